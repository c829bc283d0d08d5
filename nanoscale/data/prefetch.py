"""Prefetching: a thread reads the next step's samples while a GPU computes this step.

This gains nothing on a CPU: reading would take time from the core that computes.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from nanoscale.data.batch import Batch


class SampleSource(Protocol):
    """Samples that follow, at every step, from the number of samples consumed before, as in a `Loader`."""

    def micro_batches(
        self, consumed: int, global_batch: int, dp_rank: int, dp: int, micro_batch: int
    ) -> Iterable[Batch]: ...


class Prefetched:
    """The same samples at the same steps; an error while reading is raised when the samples are requested."""

    def __init__(self, source: SampleSource) -> None:
        self._source = source
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="samples")
        self._expected: tuple[int, ...] = ()
        self._coming: Future[list[Batch]] | None = None

    def micro_batches(
        self, consumed: int, global_batch: int, dp_rank: int, dp: int, micro_batch: int
    ) -> list[Batch]:
        layout = (global_batch, dp_rank, dp, micro_batch)
        future = self._coming
        if future is None or self._expected != (consumed, *layout):
            future = self._reader.submit(self._read, consumed, *layout)
        batches = future.result()
        self._expected = (consumed + global_batch, *layout)
        self._coming = self._reader.submit(self._read, *self._expected)
        return batches

    def _read(self, *step: int) -> list[Batch]:
        return list(self._source.micro_batches(*step))
