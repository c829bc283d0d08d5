"""Samples that a thread reads ahead."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event, get_ident

import numpy as np
import pytest

from nanoscale.data.batch import Batch
from nanoscale.data.loader import Prefetched

WAIT_S = 60.0


class Counting:
    """A batch whose only token is the number of samples consumed before; none after `end`."""

    def __init__(self, end: int = 1000) -> None:
        self.end = end
        self.asked: list[int] = []
        self.threads: set[int] = set()
        self.read_ahead = Event()

    def are_ready(self, end: int) -> bool:
        return True

    def micro_batches(
        self, consumed: int, global_batch: int, dp_rank: int, dp: int, micro_batch: int
    ) -> Iterator[Batch]:
        self.asked.append(consumed)
        self.threads.add(get_ident())
        if consumed == 12:
            self.read_ahead.set()
        if consumed >= self.end:
            raise OSError("the disk is gone")
        for _ in range(global_batch // dp // micro_batch):
            yield Batch.of_rows(np.array([[consumed, dp_rank]]))


def tokens(found: list[Batch]) -> list[int]:
    return [int(batch.inputs[0, 0]) for batch in found]


def test_every_step_has_its_own_samples_and_the_next_is_read_meanwhile() -> None:
    source = Counting()
    ahead = Prefetched(source)
    assert tokens(ahead.micro_batches(8, 4, 0, 2, 1)) == [8, 8]
    assert source.read_ahead.wait(WAIT_S)
    assert tokens(ahead.micro_batches(12, 4, 0, 2, 1)) == [12, 12]
    assert tokens(ahead.micro_batches(40, 4, 0, 2, 1)) == [40, 40], "not what was expected"
    assert tokens(ahead.micro_batches(44, 8, 1, 2, 2)) == [44, 44], "in another layout"
    assert source.asked[:2] == [8, 12] and source.asked.count(12) == 1
    assert get_ident() not in source.threads and len(source.threads) == 1
    ahead.close()  # after a rollback, another reader has the source
    with pytest.raises(RuntimeError, match="after shutdown"):
        ahead.micro_batches(0, 4, 0, 1, 4)


def test_a_failure_belongs_to_the_step_whose_samples_could_not_be_read() -> None:
    ahead = Prefetched(Counting(end=16))
    assert tokens(ahead.micro_batches(12, 4, 0, 4, 1)) == [12]
    with pytest.raises(OSError, match="the disk is gone"):
        ahead.micro_batches(16, 4, 0, 4, 1)
