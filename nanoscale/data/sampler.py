"""The order of samples: a new pseudo-random permutation every epoch, without a table.

An index is computed from (seed, position) alone in constant memory, so every rank knows every other rank's
samples and the whole state of the data is one number, the samples consumed.

The permutation of [0, n) is a balanced Feistel network over the smallest even number of bits that holds n,
applied repeatedly until the result is below n ("cycle walking"): J. Black and P. Rogaway, "Ciphers with
Arbitrary Finite Domains", CT-RSA 2002, methods 2 and 3. The round function is the finalizer of SplitMix64 (G.
Steele, D. Lea and C. Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

_ROUNDS = 8
_GOLDEN = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1
_ROUND_KEYS = np.array([[(i + 1) * _GOLDEN & _WORD] for i in range(_ROUNDS)], dtype=np.uint64)


def sample_indices(seed: int, positions: Any, n: int) -> np.ndarray:
    """Return the samples at these positions of the endless order: int64, in the shape of `positions`.

    Position p belongs to epoch p // n, and every epoch holds each of the n samples once. The values are pinned
    by tests: they never change, since a resumed run relies on them.
    """
    if not 1 <= n < 1 << 62:
        raise ValueError(f"cannot order {n} samples")
    flat_positions = np.asarray(positions, dtype=np.uint64)
    epochs, offsets = np.divmod(flat_positions.reshape(-1), np.uint64(n))
    epoch_keys = _mix(epochs + _mix(np.full(1, (seed + _GOLDEN) & _WORD, dtype=np.uint64)))
    keys = _mix(epoch_keys + _ROUND_KEYS)
    # Fewer bits would save work only for a handful of samples, and favor some of their orders.
    half = max(3, ((n - 1).bit_length() + 1) // 2)
    indices = _feistel(offsets, keys, half)
    outside = np.flatnonzero(indices >= n)
    while len(outside):
        indices[outside] = _feistel(indices[outside], keys[:, outside], half)
        outside = outside[indices[outside] >= n]
    return indices.astype(np.int64).reshape(flat_positions.shape)


def _feistel(values: Words, keys: Words, half: int) -> Words:
    """Permute [0, 4**half), each value under its own column of keys."""
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> bits, values & mask
    for round_keys in keys:
        left, right = right, left ^ (_mix(round_keys + right) & mask)
    return (left << bits) | right


def _mix(word: Words) -> Words:
    """Apply SplitMix64's finalizer: a bijection of 64 bits in which every bit changes every other."""
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))
