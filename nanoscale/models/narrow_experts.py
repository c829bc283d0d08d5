"""Products of experts in 8 bits, with torchao's casts.

Each pass is one operation: otherwise the compiler would cast the matrices for the backward pass during the
forward pass, and keep the results in addition to the matrices. It multiplies rows, which it casts once, with
several matrices.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.library import custom_op

Tensors = Sequence[Tensor]


@custom_op("nanoscale::multiply_narrow", mutates_args=())
def multiply_narrow(recipe: str, ends: Tensor, rows: Tensors, matrices: Tensors) -> list[Tensor]:
    """Return the products of the rows that end at `ends` with their expert's matrix.

    Args:
        rows: the same rows for each product, which have separate gradients.
        matrices: `[experts, out, in]` for each product; then their `cast_matrices`, if these are kept.
    """
    casts, kept = _Casts(recipe, ends), matrices[len(rows) :]
    left = casts.rows(rows[0])
    right = zip(kept[::4], kept[1::4], strict=True) if kept else map(casts.forward, matrices)
    return [casts.multiply(left, it) for it in right]


@custom_op("nanoscale::narrow_gradients", mutates_args=())
def narrow_gradients(
    recipe: str, ends: Tensor, rows: Tensor, matrices: Tensors, grads: Tensors
) -> list[Tensor]:
    casts, kept = _Casts(recipe, ends), matrices[len(grads) :]
    right = zip(kept[2::4], kept[3::4], strict=True) if kept else map(casts.backward, matrices)
    of_rows = list(map(casts.multiply, map(casts.rows, grads), right))
    columns = casts.columns(rows)
    left = map(casts.columns, grads)
    return of_rows + [casts.multiply((data.mT, scales), columns) for data, scales in left]


@torch.no_grad()
def cast_matrices(recipe: str, *weights: Tensor) -> list[Tensor]:
    """Return each matrix in 8 bits with its scales, for the forward and then for the backward pass."""
    casts, kept = _Casts(recipe, weights[0]), []
    for weight in weights:
        local = getattr(weight, "_local_tensor", weight)
        kept += [*casts.forward(local), *casts.backward(local)]
    # As parameters, they do not move to the host with activations.
    return [nn.Parameter(it, requires_grad=False) for it in kept]


class _Casts:
    """Casts of a recipe to e4m3, with scales of what a product sums: rows, columns or 32 numbers of them."""

    def __init__(self, recipe: str, ends: Tensor) -> None:
        from torchao.prototype.moe_training import fp8_grouped_mm, mxfp8_grouped_mm

        self.is_mx, self.ends = recipe == "mxfp8", ends
        self.kernels: Any = mxfp8_grouped_mm if self.is_mx else fp8_grouped_mm

    def rows(self, x: Tensor) -> Any:
        if self.is_mx:
            return self.kernels.mxfp8_quantize_2d_1x32_cutedsl(x, offs=self.ends)
        return self._inverted("rowwise_2d_scale_and_cast", x)

    def forward(self, weight: Tensor) -> Any:
        if self.is_mx:
            data, scales = self.kernels.triton_to_mxfp8_dim0(weight)
            return data.mT, self.kernels.triton_mx_block_rearrange_per_group_3d(scales)
        return self._inverted("colwise_3d_scale_and_cast", weight.mT)

    def backward(self, weight: Tensor) -> Any:
        if self.is_mx:
            return self.kernels.mxfp8_quantize_cuda_3d(weight)
        return self._inverted("rowwise_3d_transpose_rhs", weight.mT)

    def columns(self, x: Tensor) -> Any:
        if self.is_mx:
            from torchao.prototype.mx_formats import kernels

            _, data, _, scales = kernels.mxfp8_quantize_cuda(x)
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
        return torch._scaled_grouped_mm(
            *operands, out_dtype=torch.bfloat16, use_fast_accum=not self.is_mx
        )


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.recipe, ends, rows, matrices = inputs
    ctx.save_for_backward(ends, rows[0], *matrices)


def _backward(ctx: Any, grads: Tensors) -> tuple[Any, ...]:
    ends, rows, *matrices = ctx.saved_tensors
    of_both = narrow_gradients(ctx.recipe, ends, rows, matrices, grads)
    count = len(grads)
    return None, None, of_both[:count], of_both[count:] + [None] * (len(matrices) - count)


multiply_narrow.register_autograd(_backward, setup_context=_save)
multiply_narrow.register_fake(
    lambda _, __, *inputs: list(map(lambda x, it: x.new_empty(len(x), it.shape[1]), *inputs))
)
narrow_gradients.register_fake(
    lambda _, __, rows, matrices, grads: list(
        map(torch.empty_like, ([rows] * len(grads) + matrices)[: 2 * len(grads)])
    )
)
