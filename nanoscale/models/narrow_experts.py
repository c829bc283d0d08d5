"""Products of experts in 8 bits, with torchao's casts.

Each pass is one operation: otherwise the compiler would cast the matrices for the backward pass during the
forward pass, and keep the results in addition to the matrices. It multiplies rows, which it casts once, with
several matrices.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

Tensors = Sequence[Tensor]


@custom_op("nanoscale::multiply_narrow", mutates_args=())
def multiply_narrow(
    recipe: str, ends: Tensor, rows: Tensors, weights: Tensors, kept: Tensors
) -> list[Tensor]:
    """Return the products of the rows that end at `ends` with their expert's matrix, `[experts, out, in]`.

    Args:
        rows: the same rows for each of the weights, which have separate gradients.
        kept: the results of `cast_matrices` for all weights, if there are any.
    """
    casts = _Casts(recipe, ends)
    left, right = casts.rows(rows[0]), _pairs(kept)[::2] or map(casts.forward, weights)
    return [casts.multiply(left, it) for it in right]


@custom_op("nanoscale::narrow_gradients", mutates_args=())
def narrow_gradients(
    recipe: str, ends: Tensor, rows: Tensor, weights: Tensors, kept: Tensors, grads: Tensors
) -> list[Tensor]:
    casts = _Casts(recipe, ends)
    matrices = _pairs(kept)[1::2] or map(casts.backward, weights)
    of_rows = [casts.multiply(casts.rows(x), it) for x, it in zip(grads, matrices, strict=True)]
    right = casts.columns(rows)
    columns = map(casts.columns, grads)
    return of_rows + [casts.multiply((data.mT, scales), right) for data, scales in columns]


@torch.no_grad()
def cast_matrices(recipe: str, weight: Tensor) -> list[Tensor]:
    """Return the matrices in 8 bits and their scales for the forward pass, and the same for the backward."""
    casts = _Casts(recipe, weight)
    return [*casts.forward(weight), *casts.backward(weight)]


def _pairs(kept: Tensors) -> Any:
    return list(zip(kept[::2], kept[1::2], strict=True))


class _Casts:
    """Casts of a recipe to e4m3, with scales of what a product sums: rows, columns or 32 numbers of them."""

    def __init__(self, recipe: str, ends: Tensor) -> None:
        from torchao.prototype.moe_training import fp8_grouped_mm, mxfp8_grouped_mm

        self.is_mx, self.ends = recipe == "mxfp8", ends
        self.kernels: Any = mxfp8_grouped_mm if self.is_mx else fp8_grouped_mm

    def rows(self, x: Tensor) -> Any:
        if self.is_mx:
            cast = self.kernels.mxfp8_quantize_2d_1x32_cutedsl
            return cast(x, scaling_mode="rceil", offs=self.ends)
        return self._inverted("rowwise_2d_scale_and_cast", x)

    def forward(self, weight: Tensor) -> Any:
        if self.is_mx:
            data, scales = self.kernels.triton_to_mxfp8_dim0(weight, 32, "rceil")
            return data.mT, self.kernels.triton_mx_block_rearrange_per_group_3d(scales)
        return self._inverted("colwise_3d_scale_and_cast", weight.mT)

    def backward(self, weight: Tensor) -> Any:
        if self.is_mx:
            return self.kernels.mxfp8_quantize_cuda_3d(weight, 32, 32, 1, "rceil")
        return self._inverted("rowwise_3d_transpose_rhs", weight.mT)

    def columns(self, x: Tensor) -> Any:
        if self.is_mx:
            from torchao.prototype.mx_formats import kernels

            _, data, _, scales = kernels.mxfp8_quantize_cuda(x, scaling_mode="rceil")
            rearrange = self.kernels.triton_mx_block_rearrange_2d_K_groups
            return data, rearrange(scales, self.ends // 32)
        # torchao's kernel for one tensor takes all groups for equally long.
        return self._inverted("per_group_colwise_scales_dual", x, x[:, :16], self.ends)

    def _inverted(self, kernel: str, *inputs: Tensor) -> Any:
        cast = getattr(self.kernels, f"triton_fp8_{kernel}")
        data, scales, *_ = cast(*inputs, torch.float8_e4m3fn, round_scales_to_power_of_2=True)
        return data, scales.flatten(data.dim() - 2).reciprocal()

    def multiply(self, left: Any, right: Any) -> Tensor:
        operands = left[0], right[0], left[1], right[1], self.ends
        options = {"out_dtype": torch.bfloat16, "use_fast_accum": not self.is_mx}
        return torch._scaled_grouped_mm(*operands, **options)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.recipe, ends, rows, weights, kept = inputs
    ctx.weights = len(weights)
    ctx.save_for_backward(ends, rows[0], *weights, *kept)


def _backward(ctx: Any, grads: Tensors) -> tuple[Any, ...]:
    ends, rows, *others = ctx.saved_tensors
    weights, kept = others[: ctx.weights], others[ctx.weights :]
    gradients = narrow_gradients(ctx.recipe, ends, rows, weights, kept, grads)
    of_rows, of_weights = gradients[: ctx.weights], gradients[ctx.weights :]
    return None, None, of_rows, of_weights, [None] * len(kept)


multiply_narrow.register_autograd(_backward, setup_context=_save)
multiply_narrow.register_fake(
    lambda _, __, rows, weights, ___: [
        rows[0].new_empty(len(rows[0]), it.shape[1]) for it in weights
    ]
)
narrow_gradients.register_fake(
    lambda _, __, rows, weights, *___: list(map(torch.empty_like, [rows] * len(weights) + weights))
)
