"""CPU kernels for products of experts in 8 bits, which torchao and PyTorch have for GPUs alone.

Casts have the scales of torchao's own functions. Products in fp8 are computed in fp32 from the rounded numbers,
and products in MXFP8 by torchao's emulation.
"""

from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef, Library, custom_op

E4M3 = torch.float8_e4m3fn
_LIBRARY = Library("aten", "IMPL")  # its kernels live as long as it does


@cache
def register() -> None:
    """Let `narrow_experts` multiply in 8 bits on the CPU in this process."""
    from torchao.prototype.moe_training import fp8_grouped_mm, mxfp8_grouped_mm
    from torchao.prototype.mx_formats import kernels

    for name, kernel in _CASTS.items():
        cast = getattr(fp8_grouped_mm, name)
        if isinstance(cast, CustomOpDef):  # there is a GPU
            cast.register_kernel("cpu")(kernel)
            continue
        cast = custom_op(f"torchao::{name}", kernel, mutates_args=())
        cast.register_fake(kernel)
        setattr(fp8_grouped_mm, name, cast)
    for name, kernel in _MX.items():
        module = mxfp8_grouped_mm if hasattr(mxfp8_grouped_mm, name) else kernels
        setattr(module, name, partial(_on_device, getattr(module, name), kernel))
    _LIBRARY.impl("_scaled_grouped_mm", _scaled_grouped_mm, "CPU")


def _on_device(
    gpu: Callable[..., Any], cpu: Callable[..., Any], x: Tensor, *others: Any, **options: Any
) -> Any:
    return cpu(x) if x.is_cpu else gpu(x, *others, **options)


def _rows_2d(
    hp_tensor: Tensor, output_dtype: torch.dtype = E4M3, round_scales_to_power_of_2: bool = False
) -> tuple[Tensor, Tensor]:
    return _scaled(hp_tensor, hp_tensor.abs().amax(1, keepdim=True), round_scales_to_power_of_2)


def _columns_3d(
    hp_tensor: Tensor, output_dtype: torch.dtype = E4M3, round_scales_to_power_of_2: bool = False
) -> tuple[Tensor, Tensor]:
    matrix = hp_tensor.mT.contiguous()
    data, scales = _scaled(matrix, matrix.abs().amax(2, keepdim=True), round_scales_to_power_of_2)
    return data.mT, scales.mT.contiguous()


def _rows_3d_transposed(
    hp_tensor: Tensor, output_dtype: torch.dtype = E4M3, round_scales_to_power_of_2: bool = False
) -> tuple[Tensor, Tensor]:
    matrix = hp_tensor.contiguous()
    data, scales = _scaled(matrix, matrix.abs().amax(2, keepdim=True), round_scales_to_power_of_2)
    return data.mT, scales.squeeze(2)


def _columns_of_groups(
    hp_tensor_1: Tensor,
    hp_tensor_2: Tensor,
    offsets: Tensor,
    output_dtype: torch.dtype = E4M3,
    round_scales_to_power_of_2: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = torch.arange(len(hp_tensor_1), device=offsets.device)
    starts = torch.cat((offsets.new_zeros(1), offsets[:-1]))
    of_group = (rows >= starts.unsqueeze(1)) & (rows < offsets.unsqueeze(1))
    results: list[Tensor] = []
    for x in (hp_tensor_1, hp_tensor_2):
        largest = torch.where(of_group.unsqueeze(2), x.abs(), 0).amax(1)
        of_rows = (of_group.unsqueeze(2) * largest.unsqueeze(1)).sum(0)
        data, _ = _scaled(x, of_rows, round_scales_to_power_of_2)
        _, scales = _scaled(largest, largest, round_scales_to_power_of_2)
        results += [data.T.contiguous().T, scales.flatten()]
    first, of_first, second, of_second = results
    return first, of_first, second, of_second


def _scaled(x: Tensor, largest: Tensor, to_power_of_2: bool) -> tuple[Tensor, Tensor]:
    from torchao.float8.float8_utils import amax_to_scale, to_fp8_saturated

    scales = amax_to_scale(largest, E4M3, to_power_of_2)
    return to_fp8_saturated(x.float() * scales, E4M3), scales


def _scaled_grouped_mm(
    left: Tensor,
    right: Tensor,
    left_scales: Tensor,
    right_scales: Tensor,
    offs: Tensor,
    *others: Any,
) -> Tensor:
    """Multiply for each of the groups that end at `offs`. The third of the others is the result's dtype."""
    if left_scales.dtype != torch.float32:
        return _in_mxfp8(left, right, left_scales, right_scales, offs, others[2])
    bounds = [0, *offs.tolist()]
    groups = [slice(*pair) for pair in pairwise(bounds)]
    if right.dim() == 3:
        a, b = left.float() * left_scales.unsqueeze(1), right.float() * right_scales.unsqueeze(1)
        out = torch.cat([a[rows] @ matrix for rows, matrix in zip(groups, b, strict=True)])
    else:  # the gradients of weights
        scales = zip(left_scales.chunk(len(groups)), right_scales.chunk(len(groups)), strict=True)
        out = torch.stack(
            [
                (left[:, rows].float() * a.unsqueeze(1)) @ (right[rows].float() * b)
                for rows, (a, b) in zip(groups, scales, strict=True)
            ]
        )
    return out.to(others[2])


def _in_mxfp8(
    left: Tensor, right: Tensor, left_scales: Tensor, right_scales: Tensor, *others: Any
) -> Tensor:
    from torchao.prototype.moe_training import mxfp8_grouped_mm

    if right.dim() == 3:
        multiply = mxfp8_grouped_mm._emulated_mxfp8_scaled_grouped_mm_2d_3d
        return multiply(left, left_scales, right, right_scales, *others)
    multiply = mxfp8_grouped_mm._emulated_mxfp8_scaled_grouped_mm_2d_2d
    return multiply(left, left_scales, right.mT, right_scales, *others)


def _mx_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx

    scales, data = to_mx(x.contiguous(), E4M3, 32, ScaleCalculationMode.RCEIL)
    return data, scales


def _mx_columns_2d(x: Tensor) -> tuple[None, Tensor, None, Tensor]:
    data, scales = _mx_rows(x.T)
    return None, data.T, None, scales


def _mx_columns_3d(x: Tensor) -> tuple[Tensor, Tensor]:
    data, scales = _mx_rows(x.mT)
    return data.mT, scales.mT


_MX: dict[str, Callable[..., Any]] = {
    "mxfp8_quantize_2d_1x32_cutedsl": _mx_rows,
    "triton_to_mxfp8_dim0": _mx_rows,
    "mxfp8_quantize_cuda": _mx_columns_2d,
    "mxfp8_quantize_cuda_3d": _mx_columns_3d,
    "triton_mx_block_rearrange_per_group_3d": lambda scales: scales.mT,
    "triton_mx_block_rearrange_2d_K_groups": lambda scales: scales,
}
"""The emulation does not rearrange scales; the scales of matrices are transposed as the matrices are."""
_CASTS: dict[str, Callable[..., Any]] = {
    "triton_fp8_rowwise_2d_scale_and_cast": _rows_2d,
    "triton_fp8_colwise_3d_scale_and_cast": _columns_3d,
    "triton_fp8_rowwise_3d_transpose_rhs": _rows_3d_transposed,
    "triton_fp8_per_group_colwise_scales_dual": _columns_of_groups,
}
