"""The time of single operations on a device: matrix products, fused attention, element-wise work.

An operation takes max(arithmetic, memory traffic) (the roofline of Williams, Waterman & Patterson 2009), plus
some microseconds to fill and drain the device.
"""

from functools import lru_cache
from math import ceil

from nanoscale.plan.hardware.hardware import NANOSCALE, Hardware

WIDTH = {"fp64": 8, "fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "nvfp4": 0.5}
"""Bytes of a number."""

FILL = 4e-6
"""Seconds that a kernel takes in addition to its work."""
_TILES = ((256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.85))
"""Rows and columns of the tile that a multiprocessor computes at once, and the tile's rate relative to the
largest tile. Smaller tiles read their operands more often."""
SPLIT = 1.1
"""The cost factor of dividing the last wave's tiles along k. Libraries divide them if it saves time (Stream-K,
Osama et al. 2023, arXiv:2301.03598)."""
_ALIGNED = 16
"""Bytes: tensor cores load rows at their full rate if the length of a row is a multiple (NVIDIA, Matrix
Multiplication Background User's Guide, section on tensor cores)."""
_UNALIGNED = 3.0
"""The time of a 16-bit product with other rows over the time with aligned rows. nanoGPT's step on A100s
became 25 % faster with a vocabulary of 50,304 in place of 50,257 tokens, as its author published in February
2023; with this factor the plan says 22 %."""
_PROLOGUE = 128
"""Steps along k that take as long as loading a tile's first operands and storing its result."""
_ATTENTION_TILE = 128
"""Queries in a tile. The causal mask saves nothing within the tiles on the diagonal."""
_HEAD_SIZE = 0.15
"""The exponent of the head size: a head of 64 reaches nine tenths of the rate of one of 128 (Dao 2023,
arXiv:2307.08691, figures 4 to 6)."""
_BACKWARD_FLOPS = 2.5
"""The FLOPs of fused attention, backward over forward: five products instead of two (arXiv:2307.08691)."""
_BACKWARD_RATE = 0.8
"""The rate of fused attention, backward over forward (arXiv:2307.08691)."""


@lru_cache(maxsize=65536)
def product(
    hardware: Hardware,
    kind: str,
    m: int,
    n: int,
    k: int,
    groups: int = 1,
    aligned: bool | None = None,
    grouped: float = NANOSCALE.grouped,
) -> float:
    """Return the seconds for [m, k] · [k, n] in dtype `kind`, or for `groups` such products in one kernel.

    Tiles are assigned to the multiprocessors in waves, and the last wave is rarely full (NVIDIA, Matrix
    Multiplication Background User's Guide, sections on tile and wave quantization).

    Args:
        aligned: True if the rows in memory are aligned; None if the rows are of n and k numbers.
        grouped: the rate of several products in one kernel over one product's.
    """
    efficiency = hardware.efficiency
    share = efficiency.matmul_fp8 if kind in ("fp8", "nvfp4") else efficiency.matmul
    share *= grouped if groups > 1 else 1.0
    arithmetic = 2.0 * groups * m * n * k / (hardware.peaks[kind] * share)
    if hardware.multiprocessors > 1:  # not a CPU
        arithmetic *= waves(hardware.multiprocessors, m, n, groups) * (1 + _PROLOGUE / max(k, 1))
        if aligned is None:
            aligned = not any(length * WIDTH[kind] % _ALIGNED for length in (n, k))
        if WIDTH[kind] < 4 and not aligned:
            arithmetic *= _UNALIGNED
    result = max(2, WIDTH[kind])
    traffic = groups * (WIDTH[kind] * (m + n) * k + result * m * n)
    return max(arithmetic, traffic / (hardware.memory_bandwidth * efficiency.memory)) + FILL


def waves(multiprocessors: int, m: int, n: int, groups: int = 1) -> float:
    """Return the time of a product over its time if every multiprocessor always had a full tile, at least 1."""
    factors = []
    for rows, columns, rate in _TILES:
        tiles = ceil(m / rows) * ceil(n / columns)
        padding = tiles * rows * columns / (m * n)
        tiles *= groups
        last_wave = ceil(tiles / multiprocessors) * multiprocessors / tiles
        if tiles >= multiprocessors:
            last_wave = min(last_wave, SPLIT)
        factors.append(last_wave * padding / rate)
    return min(factors)


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
    """Return the seconds of fused attention, forward. A backward pass takes `BACKWARD_ATTENTION` times as long.

    With `causal`, `queries` equals `keys`, and a query attends to itself and the keys before it. Otherwise
    every query attends to every key. A multiprocessor computes a tile of queries against all keys of the tile,
    so a pass takes at least the time of the longest tile: few heads of a short sequence do not fill a device
    (Dao 2023, arXiv:2307.08691, section 3.2).
    """
    efficiency = hardware.efficiency
    if hardware.multiprocessors == 1:  # a CPU
        pairs = batch * heads * queries * keys / (2 if causal else 1)
        return 4.0 * head_dim * pairs / (hardware.peaks[kind] * efficiency.attention) + FILL
    # With a small head size, the products take too little time to hide the exponentials.
    head_size: float = min(1.0, head_dim / 128) ** _HEAD_SIZE
    mean_keys = keys / 2 if causal else keys
    share = efficiency.attention * (efficiency.cudnn if kernel == "cudnn" else 1.0)
    rate = hardware.peaks[kind] * share * head_size * mean_keys / (mean_keys + _ATTENTION_TILE)
    area = queries * (keys + _ATTENTION_TILE) / 2 if causal else queries * keys
    pairs = batch * heads * area
    longest_tile = min(queries, _ATTENTION_TILE) * keys * hardware.multiprocessors
    return 4.0 * head_dim * max(pairs, longest_tile) / rate + FILL


BACKWARD_ATTENTION = _BACKWARD_FLOPS / _BACKWARD_RATE


def elementwise(hardware: Hardware, size: float) -> float:
    """Return the seconds to move `size` bytes between the device and its memory."""
    return size / (hardware.memory_bandwidth * hardware.efficiency.memory)
