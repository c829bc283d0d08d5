"""What a device does with products of large matrices, measured: the roof under which a training can get."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from nanoscale.config.hardware.data_sheets import kind
from nanoscale.config.schema import Precision
from nanoscale.metrics.meter import wait_for
from nanoscale.parallel.fsdp import DTYPES

_SIDES = {"cuda": (8192,), "cpu": (512, 1024)}
_BATCH_S = {"cuda": 0.2, "cpu": 0.005}
"""on a GPU long enough for it to lower its clock, if such products make it; on a CPU short enough that others
who take turns there miss some"""
_BATCHES = {"cuda": 5, "cpu": 30}
_WARM_UP = 2


def matmul_rate(precision: Precision, device: torch.device) -> float:
    """FLOP/s of square products in the type that blocks are computed in, of random numbers, one after another.

    The sides are 8192 on a GPU; on a CPU 512 or 1024, whichever is faster. It is that of the fastest of some
    batches: a roof, also where others use the device too.
    """
    return max(_rate(precision, side, device) for side in _SIDES[device.type])


def _rate(precision: Precision, side: int, device: torch.device) -> float:
    multiply = _product(precision, side, device)
    for _ in range(_WARM_UP):
        once = _seconds(multiply, 1, device)
    count = max(1, round(_BATCH_S[device.type] / once))
    batches = [_seconds(multiply, count, device) for _ in range(_BATCHES[device.type])]
    return count * 2 * side**3 / min(batches)


def _product(precision: Precision, side: int, device: torch.device) -> Callable[[], Tensor]:
    def draw(dtype: torch.dtype) -> Tensor:
        return torch.randn(side, side, device=device).to(dtype)

    if kind(precision) != "fp8":
        a, b = (draw(DTYPES[precision.compute]) for _ in range(2))
        return lambda: a @ b
    eight, one = torch.float8_e4m3fn, torch.ones((), device=device)
    left, right = draw(eight), draw(eight).t()
    return lambda: torch._scaled_mm(left, right, one, one, out_dtype=torch.bfloat16)


def _seconds(multiply: Callable[[], Tensor], count: int, device: torch.device) -> float:
    wait_for(device)
    began = time.perf_counter()
    for _ in range(count):
        multiply()
    wait_for(device)
    return time.perf_counter() - began
