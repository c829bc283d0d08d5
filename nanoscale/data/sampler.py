"""The order of samples: a new pseudo-random permutation every epoch, without a table.

An index is computed from (seed, position) alone in constant memory, so every rank knows every other rank's
samples and the whole state of the data is one number, the samples consumed.

The permutation of [0, n) is a balanced Feistel network over the smallest even number of bits that holds n,
applied repeatedly until the result is below n ("cycle walking"): J. Black and P. Rogaway, "Ciphers with
Arbitrary Finite Domains", CT-RSA 2002, methods 2 and 3. The round function is the finalizer of SplitMix64 (G.
Steele, D. Lea and C. Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014).
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

_AHEAD = 1024
"""A call computes the numbers of this many samples of a rank."""
_WINDOW = 1 << 20
"""The widest range of all ranks' samples that such a call covers."""

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


def due(shares: np.ndarray, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the sources of positions [start, stop) and the number of each sample within its source; int64.

    The j-th sample of a source with share w is due at time (j + 1/2) / w, counted in samples of the data
    mixture, and samples come in the order of these times (the stride scheduling of C. Waldspurger and W. Weihl,
    MIT technical memo TM-528, 1995; the rounding is A. Sainte-Laguë's, for seats). After p samples of k
    sources, a source with share w has given p · w of them, to within (1 + k · w) / 2.

    Ties go by the order of the sources. Times are computed from the number of the sample alone, and rounding
    keeps their order, so every window of positions gives the same result.
    """
    first, sources, numbers = _in_order(shares, start, stop)
    skipped = start - int(first.sum())
    window = slice(skipped, skipped + stop - start)
    return sources[window], numbers[window]


def taken(shares: np.ndarray, count: int) -> np.ndarray:
    """Return the samples of each source among the first `count` positions: int64 `[sources]`."""
    first, sources, _ = _in_order(shares, count, count)
    earlier = sources[: count - int(first.sum())]
    return first + np.bincount(earlier, minlength=len(shares))


def _in_order(
    shares: np.ndarray, start: int, stop: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the first number of each source, then sources and numbers in their order around a window."""
    # Up to time t, t samples are due, to within one half for each source.
    margin = len(shares) + 1
    first = np.floor(shares * (start - margin) - 1).clip(0).astype(np.int64)
    last = np.ceil(shares * (stop + margin) + 1).astype(np.int64)
    sources = np.repeat(np.arange(len(shares)), last - first)
    numbers = np.concatenate(
        [np.arange(begin, end) for begin, end in zip(first, last, strict=True)]
    )
    with np.errstate(divide="ignore"):  # a source without a share is never due
        times = (numbers + 0.5) / shares[sources]
    order = times.argsort(kind="stable")
    return first, sources[order], numbers[order]


class PrecomputedSamples:
    """A rank's samples of one step, computed for many steps at once, since the overhead of a call dominates."""

    def __init__(
        self, find: Callable[[np.ndarray], np.ndarray], rows: int, ahead: int = _AHEAD
    ) -> None:
        """Make it of a function from int64 positions `[…]` of the order to the samples there, `[*, …]`.

        A sample takes `rows` rows of a batch. `ahead`: the most samples of this rank in a call, or a step's.
        """
        self._find = find
        self._most = ahead
        self._rows = rows
        self._layout = (0, 0, 0)
        self._consumed = 0
        self._samples_ahead = np.empty((0, 0), dtype=np.int64)

    def micro_batches(
        self, consumed: int, global_batch: int, dp_rank: int, dp: int, micro_batch: int
    ) -> Iterator[np.ndarray]:
        """Yield the samples of each micro batch of this rank in a step, `[*, micro_batch / rows]`."""
        consumed, global_batch, micro_batch = (
            number // self._rows for number in (consumed, global_batch, micro_batch)
        )
        share, remainder = divmod(global_batch, dp)
        if remainder or share % micro_batch or not 0 <= dp_rank < dp:
            raise ValueError(f"{global_batch=} does not divide into {dp=} times {micro_batch=}")
        samples = self._step(consumed, global_batch, dp_rank, share)
        for start in range(0, share, micro_batch):
            yield samples[..., start : start + micro_batch]

    def _step(self, consumed: int, global_batch: int, dp_rank: int, share: int) -> np.ndarray:
        """Return the samples at the `share` positions of this rank, `[*, share]`."""
        layout = (global_batch, dp_rank, share)
        step, remainder = divmod(consumed - self._consumed, global_batch)
        if self._layout != layout or remainder or not 0 <= step < self._samples_ahead.shape[-2]:
            step_count = max(1, min(self._most // share, _WINDOW // global_batch))
            steps = consumed + global_batch * np.arange(step_count)
            positions = steps[:, None] + dp_rank * share + np.arange(share)
            self._layout, self._consumed = layout, consumed
            self._samples_ahead = self._find(positions)
            step = 0
        return self._samples_ahead[..., step, :]
