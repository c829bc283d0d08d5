"""CPU kernels for products in NVFP4, which torchao and PyTorch have for GPUs alone.

They round as torchao's Triton kernels do, but for the numbers that decide whether a gradient is rounded up.
Products are computed in fp32 from the rounded numbers, and scales are stored in the order of rows.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef, Library, custom_op

BLOCK, LARGEST = 16, 6.0
"""Numbers with one scale, and e2m1's largest number."""
_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers of e2m1 by their codes."""
_DOWN = (0.25, 0.75 - 2**-24, 1.25, 1.75 - 2**-23, 2.5, 3.5 - 2**-22, 5.0)
"""The largest numbers that are rounded down: the middle of two numbers is rounded to the even code."""
E4M3 = torch.float8_e4m3fn
_LIBRARY = Library("aten", "IMPL")  # its kernels live as long as it does


@cache
def register() -> None:
    """Let torchao's NVFP4 layers multiply on the CPU in this process."""
    from torchao.prototype.moe_training.nvfp4_training import nvfp4_linear

    for kernel in (triton_rht_amax, triton_rht_quantize_row_col, triton_weight_quantize_2d):
        known = getattr(nvfp4_linear, kernel.__name__)
        if isinstance(known, CustomOpDef):  # there is a GPU
            known.register_kernel("cpu")(kernel)
            continue
        operation = custom_op(f"torchao::{kernel.__name__}", kernel, mutates_args=())
        operation.register_fake(partial(_fake, kernel))
        setattr(nvfp4_linear, kernel.__name__, operation)
    _LIBRARY.impl("_scaled_mm_v2", _scaled_mm, "CPU", allow_override=True)


def _fake(kernel: Callable[..., Any], *inputs: Any, **_: Any) -> Any:
    return kernel(*inputs[:4])  # without random rounding, which reads a tensor


def triton_rht_amax(
    x: Tensor, sign_vector: list[int], hadamard_dimension: int = BLOCK, scaling_type: int = 0
) -> tuple[Tensor, Tensor]:
    return _transformed(x, sign_vector).abs().amax().float(), x.abs().amax().float()


def triton_rht_quantize_row_col(
    x: Tensor,
    col_global_amax: Tensor,
    row_global_amax: Tensor,
    sign_vector: list[int],
    stochastic_rounding: bool = False,
    hadamard_dimension: int = BLOCK,
    scaling_type: int = 0,
    col_seed_base: Tensor | None = None,
    col_offset_base: Tensor | None = None,
    row_offset_base: Tensor | None = None,
    row_seed_base: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    columns = _transformed(x, sign_vector)
    of_columns, of_rows = (col_seed_base, col_offset_base), (row_seed_base, row_offset_base)
    if not stochastic_rounding:
        of_columns = of_rows = (None, None)
    return (
        *_quantized(columns, _largest(columns), col_global_amax, *of_columns),
        *_quantized(x, _largest(x), row_global_amax, *of_rows),
    )


def triton_weight_quantize_2d(
    x: Tensor, global_amax: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_tiles = _largest(x).unflatten(0, (-1, BLOCK)).amax(1)
    of_rows = of_tiles.repeat_interleave(BLOCK, 0)
    of_columns = of_tiles.T.repeat_interleave(BLOCK, 0)
    transposed = x.T.contiguous()
    return (*_quantized(x, of_rows, global_amax), *_quantized(transposed, of_columns, global_amax))


def _transformed(x: Tensor, signs: list[int]) -> Tensor:
    """Return the transposed matrix, of whose rows each 16 numbers are transformed."""
    from torchao.prototype.moe_training.nvfp4_training.hadamard_utils import get_hadamard_matrix

    matrix = torch.tensor(signs, device=x.device).unsqueeze(1) * get_hadamard_matrix(
        BLOCK, x.device, torch.float32
    )
    return (x.T.float().unflatten(1, (-1, BLOCK)) @ matrix).flatten(1).to(x.dtype)


def _largest(x: Tensor) -> Tensor:
    return x.float().abs().unflatten(1, (-1, BLOCK)).amax(2)


def _quantized(
    x: Tensor,
    largest: Tensor,
    of_matrix: Tensor,
    key: Tensor | None = None,
    position: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return two codes a byte, and the scales, in the shape that GPUs need.

    Args:
        largest: of each block of a row.
        key: of the random rounding; None: to the nearest number.
    """
    factor = torch.where(of_matrix == 0, 1.0, 448 * LARGEST / of_matrix)
    tiny = torch.finfo(E4M3).tiny
    scales = (largest / LARGEST * factor).clamp(tiny, 448).to(E4M3)
    blocks = x.float().unflatten(1, (-1, BLOCK)) / (scales.float() / factor).unsqueeze(2)
    scaled = blocks.flatten(1).clamp(-LARGEST, LARGEST)
    if key is not None and position is not None:
        scaled = _rounded(scaled, int(key) * 2**32 + int(position))
    codes = torch.bucketize(scaled.abs(), torch.tensor(_DOWN)) + 8 * scaled.signbit()
    rows, width = x.shape
    return (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8), scales.view(
        rows // 128, width // 64, 32, 16
    )


def _rounded(x: Tensor, seed: int) -> Tensor:
    """Round to a neighbor of e2m1 at random, so that the mean is `x`."""
    dice = torch.Generator().manual_seed(seed % 2**63)
    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    up = torch.rand(x.shape, generator=dice)
    return ((size / step + up).floor() * step).copysign(x)


def _scaled_mm(
    left: Tensor, right: Tensor, of_left: list[Tensor], _: Any, __: Any, of_right: list[Tensor], *others: Any
) -> Tensor:  # fmt: skip
    """Multiply two matrices of codes. The fourth of the others is the result's dtype."""
    a, b = dequantized(left, of_left[0]), dequantized(right.T, of_right[0])
    return (a @ b.T * (of_left[1] * of_right[1])).to(others[3])


def dequantized(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers of two codes a byte, but for the scale of the matrix."""
    pairs = codes.view(torch.uint8)
    numbers = torch.tensor(_NUMBERS)[torch.stack((pairs & 15, pairs >> 4), -1).flatten(1).int()]
    return numbers * scales.view(len(numbers), -1).float().repeat_interleave(BLOCK, 1)
