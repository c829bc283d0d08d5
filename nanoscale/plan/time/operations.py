"""How long single operations take on a device: matrix products, fused attention, element-wise work.

Every operation takes the longer of what its arithmetic and its memory traffic need (the roofline of Williams,
Waterman & Patterson 2009), and some microseconds to fill and drain the device.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil

from nanoscale.plan.hardware.hardware import Hardware

WIDTH = {"fp64": 8, "fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
"""bytes of a number"""

FILL = 4e-6
"""s that a kernel takes beside its work"""
_TILES = ((256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.85))
"""rows and columns of the result that a multiprocessor computes at once, and what such a tile reaches of the
largest one's rate: smaller ones read their operands more often"""
SPLIT = 1.1
"""what it costs to divide the last wave's tiles along k, which libraries do where it is cheaper (Stream-K,
Osama et al. 2023, arXiv:2301.03598)"""
_PROLOGUE = 128
"""steps along k worth of time to load a tile's first operands and to store its result"""
_ATTENTION_TILE = 128
"""queries in a tile: the diagonal's tiles are computed whole"""
_NARROW = 0.15
"""a head of 64 reaches nine tenths of the rate of one of 128 (Dao 2023, arXiv:2307.08691, figures
4 to 6)"""
_BACKWARD_FLOPS = 2.5
"""of fused attention, backward over forward: five products where there were two (same source)"""
_BACKWARD_RATE = 0.8
"""of its rate, backward over forward (same source)"""


@lru_cache(maxsize=65536)
def product(hardware: Hardware, kind: str, m: int, n: int, k: int, groups: int = 1) -> float:
    """Seconds for [m, k] · [k, n] with numbers of type `kind`; of `groups` such products in one kernel.

    Tiles are dealt to the multiprocessors in waves, and the last wave is rarely full (NVIDIA, Matrix
    Multiplication Background User's Guide, sections on tile and wave quantization).
    """
    efficiency = hardware.efficiency
    share = efficiency.matmul_fp8 if kind == "fp8" else efficiency.matmul
    arithmetic = 2.0 * groups * m * n * k / (hardware.peaks[kind] * share)
    arithmetic *= waves(hardware.multiprocessors, m, n, groups) * (1 + _PROLOGUE / max(k, 1))
    result = 2 if kind == "fp8" else WIDTH[kind]
    traffic = groups * (WIDTH[kind] * (m + n) * k + result * m * n)
    return max(arithmetic, traffic / (hardware.memory_bandwidth * efficiency.memory)) + FILL


def waves(multiprocessors: int, m: int, n: int, groups: int = 1) -> float:
    """Time over that of a device whose every multiprocessor always had a full tile, at least 1."""
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
    """Seconds for a forward pass of fused attention; backward takes `BACKWARD_ATTENTION` times it.

    `causal`: of `queries` to as many keys; else every query attends to every key. A multiprocessor computes
    a tile of queries against all their keys, so that the longest tile is the least that a pass can take: few
    heads of a short sequence do not fill a device (Dao 2023, arXiv:2307.08691, section 3.2).
    """
    efficiency = hardware.efficiency
    # Narrow heads leave the exponentials less time to hide behind products; wide ones fill the registers.
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
    """Seconds to move `size` bytes between the device and its memory."""
    return size / (hardware.memory_bandwidth * hardware.efficiency.memory)
