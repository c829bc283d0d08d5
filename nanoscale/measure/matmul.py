"""The measured speed of large matrix products on a device: the upper bound of a training's speed."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from nanoscale.config.hardware.data_sheets import kind
from nanoscale.config.schema import Precision
from nanoscale.metrics.meter import wait_for
from nanoscale.parallel.fsdp import TORCH_DTYPES

_SIDES = {"cuda": (8192,), "cpu": (512, 1024)}
_BATCH_S = {"cuda": 0.2, "cpu": 0.005}
"""Seconds of a batch of products: on a GPU long enough for it to lower its clock under this load, on a CPU
short enough that other processes miss some batches."""
_BATCHES = {"cuda": 5, "cpu": 30}
_WARM_UP = 2


def matmul_rate(precision: Precision, device: torch.device) -> float:
    """Return the FLOP/s of square products in the compute dtype, of random numbers, one after another.

    The sides are 8192 on a GPU; on a CPU 512 or 1024, whichever is faster. The fastest of several batches
    counts: an upper bound, even if other processes use the device too.
    """
    fastest = 0.0
    for side in _SIDES[device.type]:
        multiply = _product(precision, side, device)
        for _ in range(_WARM_UP):
            once = _seconds(multiply, 1, device)
        count = max(1, round(_BATCH_S[device.type] / once))
        batches = [_seconds(multiply, count, device) for _ in range(_BATCHES[device.type])]
        fastest = max(fastest, count * 2 * side**3 / min(batches))
    return fastest


def _product(precision: Precision, side: int, device: torch.device) -> Callable[[], Tensor]:
    def draw(dtype: torch.dtype) -> Tensor:
        return torch.randn(side, side, device=device).to(dtype)

    if kind(precision) != "fp8":
        a, b = (draw(TORCH_DTYPES[precision.compute]) for _ in range(2))
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
