"""A data mixture: samples of several sources, in constant shares at every moment of the run.

The j-th sample of a source with share w is due at time (j + 1/2) / w, counted in samples of the data mixture,
and samples come in the order of these times (the stride scheduling of C. Waldspurger and W. Weihl, MIT
technical memo TM-528, 1995; the rounding is that of A. Sainte-Laguë's seats). After p samples of k sources, a
source with share w has given p · w of them, to within (1 + k · w) / 2. A sample follows from its position
alone, so the whole state is, as with one source, the number of samples consumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from nanoscale.data.batch import Batch
from nanoscale.data.loader import Loader, PrecomputedSamples, rows_of_rank


class Mixture:
    """A data mixture of loaders; each has its own order and repeats epoch after epoch."""

    def __init__(self, loaders: Sequence[Loader], weights: Sequence[float]) -> None:
        """Weights are positive and may have any sum."""
        self.loaders = list(loaders)
        self.shares = np.asarray(weights, dtype=np.float64) / np.sum(weights)
        self._ahead = PrecomputedSamples(self._find)

    def micro_batches(
        self, consumed: int, global_batch: int, dp_rank: int, dp: int, micro_batch: int
    ) -> Iterator[Batch]:
        """Yield batches like `Loader.micro_batches`."""
        share = rows_of_rank(global_batch, dp_rank, dp, micro_batch)
        sources, samples = self._ahead.step(consumed, global_batch, dp_rank, share)
        for start in range(0, share, micro_batch):
            yield self._batch(
                *(values[start : start + micro_batch] for values in (sources, samples))
            )

    def _batch(self, sources: np.ndarray, samples: np.ndarray) -> Batch:
        rows = [(sources == number).nonzero()[0] for number in range(len(self.loaders))]
        batches = [
            loader.batch(samples[positions])
            for loader, positions in zip(self.loaders, rows, strict=True)
            if len(positions)
        ]
        inverse = np.argsort(np.concatenate(rows))
        return Batch.concatenate(batches).take(inverse)

    def _find(self, positions: np.ndarray) -> np.ndarray:
        """Return sources and the numbers of their samples: int64 `[2, *positions.shape]`."""
        first = int(positions.min())
        sources, numbers = due(self.shares, first, int(positions.max()) + 1)
        result = np.stack([sources, numbers])[:, positions - first]
        for number, loader in enumerate(self.loaders):
            from_source = result[0] == number
            result[1, from_source] = loader.order(result[1, from_source])
        return result


def due(shares: np.ndarray, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the sources of positions [start, stop) and the number of each sample within its source; int64.

    Ties go by the order of the sources. Times are computed from the number of the sample alone, and rounding
    keeps their order, so every window of positions gives the same result.
    """
    # Up to time t, t samples are due, to within one half for each source.
    margin = len(shares) + 1
    first = np.floor(shares * (start - margin) - 1).clip(0).astype(np.int64)
    last = np.ceil(shares * (stop + margin) + 1).astype(np.int64)
    sources = np.repeat(np.arange(len(shares)), last - first)
    numbers = np.concatenate(
        [np.arange(begin, end) for begin, end in zip(first, last, strict=True)]
    )
    times = (numbers + 0.5) / shares[sources]
    order = times.argsort(kind="stable")
    skipped = start - int(first.sum())
    window = order[skipped : skipped + stop - start]
    return sources[window], numbers[window]
