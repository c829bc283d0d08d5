"""Samples of several sources, each with its share of them at every moment of the run.

The j-th sample of a source with share w falls due at time (j + 1/2) / w, counted in samples of the mixture, and
samples come in the order in which they fall due (the stride scheduling of C. Waldspurger and W. Weihl, MIT
technical memo TM-528, 1995; the rounding is that of A. Sainte-Laguë's seats). After p samples of k sources, one
with share w has given p · w of them, to within (1 + k · w) / 2. Where a sample stands follows from its place
alone, so that the whole state is, as with one source, the number of samples consumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from nanoscale.data.batch import Batch
from nanoscale.data.loader import Ahead, Loader, rows_of_rank


class Mixture:
    """Draws from loaders, each in its own order and epoch after epoch."""

    def __init__(self, loaders: Sequence[Loader], weights: Sequence[float]) -> None:
        """`weights`: positive, of any sum."""
        self.loaders = list(loaders)
        self.shares = np.asarray(weights, dtype=np.float64) / np.sum(weights)
        self._ahead = Ahead(self._find)

    def micro_batches(
        self, consumed: int, global_batch: int, dp_rank: int, dp: int, micro_batch: int
    ) -> Iterator[Batch]:
        """As `Loader.micro_batches`."""
        share = rows_of_rank(global_batch, dp_rank, dp, micro_batch)
        sources, samples = self._ahead.step(consumed, global_batch, dp_rank, share)
        for start in range(0, share, micro_batch):
            yield self._batch(*(found[start : start + micro_batch] for found in (sources, samples)))

    def _batch(self, sources: np.ndarray, samples: np.ndarray) -> Batch:
        rows = [(sources == number).nonzero()[0] for number in range(len(self.loaders))]
        found = [
            loader.batch(samples[mine])
            for loader, mine in zip(self.loaders, rows, strict=True)
            if len(mine)
        ]
        back = np.argsort(np.concatenate(rows))
        return Batch.concatenate(found).take(back)

    def _find(self, positions: np.ndarray) -> np.ndarray:
        """Sources and the numbers of their samples: int64 `[2, *positions.shape]`."""
        first = int(positions.min())
        sources, places = due(self.shares, first, int(positions.max()) + 1)
        found = np.stack([sources, places])[:, positions - first]
        for number, loader in enumerate(self.loaders):
            mine = found[0] == number
            found[1, mine] = loader.order(found[1, mine])
        return found


def due(shares: np.ndarray, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """What falls due at places [start, stop): the sources, and how many of the source came before; int64.

    Equal times are taken in the order of the sources. Times are computed from the number of the sample alone,
    and rounding keeps their order, so that every window of places sees the same.
    """
    # Up to time t, t samples have fallen due to within half of one for each source.
    reach = len(shares) + 1
    first = np.floor(shares * (start - reach) - 1).clip(0).astype(np.int64)
    last = np.ceil(shares * (stop + reach) + 1).astype(np.int64)
    sources = np.repeat(np.arange(len(shares)), last - first)
    numbers = np.concatenate([np.arange(a, b) for a, b in zip(first, last, strict=True)])
    times = (numbers + 0.5) / shares[sources]
    order = times.argsort(kind="stable")
    skipped = start - int(first.sum())
    window = order[skipped : skipped + stop - start]
    return sources[window], numbers[window]
