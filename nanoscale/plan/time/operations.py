"""The time of single operations on a device: matrix products, fused attention, element-wise work.

An operation takes the longer of the times of its arithmetic and of its memory traffic (the roofline of
Williams, Waterman & Patterson 2009), and some microseconds to fill and drain the device.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil

from nanoscale.plan.hardware.hardware import Hardware

WIDTH = {"fp64": 8, "fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
"""Bytes of a number."""

FILL = 4e-6
"""Seconds that a kernel takes in addition to its work."""
_TILES = ((256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.85))
"""Rows and columns of the result that a multiprocessor computes at once, and the rate of such a tile relative
to the largest one: smaller ones read their operands more often."""
SPLIT = 1.1
"""The cost factor of dividing the last wave's tiles along k, which libraries do if it is cheaper (Stream-K,
Osama et al. 2023, arXiv:2301.03598)."""
_PROLOGUE = 128
"""Steps along k that take as long as loading a tile's first operands and storing its result."""
_ATTENTION_TILE = 128
"""Queries in a tile: the diagonal's tiles are computed whole."""
_NARROW = 0.15
"""The exponent of the head size: a head of 64 reaches nine tenths of the rate of one of 128 (Dao 2023,
arXiv:2307.08691, figures 4 to 6)."""
_BACKWARD_FLOPS = 2.5
"""The FLOPs of fused attention, backward over forward: five products instead of two (same source)."""
_BACKWARD_RATE = 0.8
"""The rate of fused attention, backward over forward (same source)."""


@lru_cache(maxsize=65536)
def product(hardware: Hardware, kind: str, m: int, n: int, k: int, groups: int = 1) -> float:
    """Return the seconds for [m, k] · [k, n] with numbers of type `kind`, or for `groups` such products in one
    kernel.

    Tiles are assigned to the multiprocessors in waves, and the last wave is rarely full (NVIDIA, Matrix
    Multiplication Background User's Guide, sections on tile and wave quantization).
    """
    efficiency = hardware.efficiency
    share = efficiency.matmul_fp8 if kind == "fp8" else efficiency.matmul
    arithmetic = 2.0 * groups * m * n * k / (hardware.peaks[kind] * share)
    if hardware.multiprocessors > 1:  # a CPU divides its work otherwise
        arithmetic *= waves(hardware.multiprocessors, m, n, groups) * (1 + _PROLOGUE / max(k, 1))
    result = 2 if kind == "fp8" else WIDTH[kind]
    traffic = groups * (WIDTH[kind] * (m + n) * k + result * m * n)
    return max(arithmetic, traffic / (hardware.memory_bandwidth * efficiency.memory)) + FILL


def waves(multiprocessors: int, m: int, n: int, groups: int = 1) -> float:
    """Return the time over that of a device whose every multiprocessor always has a full tile, at least 1."""
    best = float("inf")
    for rows, columns, rate in _TILES:
        down, across = ceil(m / rows), ceil(n / columns)
        tiles = groups * down * across
        padded = down * across * rows * columns / (m * n)
        whole = ceil(tiles / multiprocessors) * multiprocessors / tiles
        if tiles >= multiprocessors:
            whole = min(whole, SPLIT)
        best = min(best, whole * padded / rate)
    return best


@lru_cache(maxsize=16384)
def attention(
    hardware: Hardware,
    kind: str,
    batch: int,
    queries: int,
    keys: int,
    heads: int,
    head_dim: int,
    causal: bool = True,
    kernel: str = "flash",
) -> float:
    """Return the seconds of a forward pass of fused attention; backward takes `BACKWARD_ATTENTION` times as
    long.

    With `causal`, `queries` attend to as many keys; else every query attends to every key. A multiprocessor
    computes a tile of queries against all their keys, so the longest tile is the least time of a pass: few
    heads of a short sequence do not fill a device (Dao 2023, arXiv:2307.08691, section 3.2).
    """
    efficiency = hardware.efficiency
    if hardware.multiprocessors == 1:  # a CPU has no such tiles
        pairs = batch * heads * queries * keys / (2 if causal else 1)
        return 4.0 * head_dim * pairs / (hardware.peaks[kind] * efficiency.attention) + FILL
    # Narrow heads leave less time to hide the exponentials behind products; wide ones fill the registers.
    narrow: float = min(1.0, head_dim / 128) ** _NARROW
    usual = keys / 2 if causal else keys
    share = efficiency.attention * (efficiency.cudnn if kernel == "cudnn" else 1.0)
    rate = hardware.peaks[kind] * share * narrow * usual / (usual + _ATTENTION_TILE)
    area = queries * (keys + _ATTENTION_TILE) / 2 if causal else queries * keys
    everything = batch * heads * area
    longest = min(queries, _ATTENTION_TILE) * keys * hardware.multiprocessors
    return 4.0 * head_dim * max(everything, longest) / rate + FILL


BACKWARD_ATTENTION = _BACKWARD_FLOPS / _BACKWARD_RATE


def elementwise(hardware: Hardware, size: float) -> float:
    """Return the seconds to move `size` bytes between the device and its memory."""
    return size / (hardware.memory_bandwidth * hardware.efficiency.memory)
