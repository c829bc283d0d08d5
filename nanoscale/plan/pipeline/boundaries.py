"""Tensors between stages that a pipeline rank holds in addition to the inputs of its in-flight micro batches.

A received tensor has a buffer from the time at which its sender has computed it. An output is held until its
gradient is used; a sent gradient until an input arrives that the stage before has sent later
(`parallel.pipeline`). Between two stages of one rank, the output of the first stage is the buffer of the
second.
Each tensor is `[micro_batch, seq, hidden]`, divided by cp and, with sequence parallelism, by tp.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from nanoscale.config.layout import rank_of
from nanoscale.plan.pipeline.orders import Action, order


@lru_cache(maxsize=1024)
def at_peak(schedule: str, pp: int, virtual_stages: int, micro_batches: int) -> tuple[int, ...]:
    """Return the number of tensors of each rank while most micro batches are in flight.

    1F1B waits for each tensor, and has one gradient of its output and two of its input at a time.
    """
    if pp == 1:
        return (0,)
    if schedule == "1f1b":
        last = pp - 1
        return tuple(
            (min(micro_batches, pp - rank) + 1) * (rank < last) + 2 * (rank > 0)
            for rank in range(pp)
        )
    few = min(micro_batches, 2 * pp)  # the middle of a step repeats itself
    return tuple(max(counts)[1] for counts in by_action(schedule, pp, virtual_stages, few))


@lru_cache(maxsize=1024)
def by_action(
    schedule: str, pp: int, virtual_stages: int, micro_batches: int
) -> tuple[list[tuple[int, int]], ...]:
    """Return the numbers of in-flight micro batches and of tensors during each action of each rank."""
    transfers = _Transfers(
        [rank_of(schedule, pp, stage) for stage in range(pp * virtual_stages)], pp
    )
    ranks = order(schedule, pp, virtual_stages, micro_batches)
    waiting = [list(reversed(actions)) for actions in ranks]
    while any(waiting):
        for actions in waiting:
            if actions and transfers.can_run(actions[-1]):
                transfers.run(actions.pop())
    return transfers.counts


class _Transfers:
    """The tensors between stages that each rank holds while all ranks run their actions in turn."""

    def __init__(self, rank_of_stage: Sequence[int], pp: int) -> None:
        self.counts: tuple[list[tuple[int, int]], ...] = tuple([] for _ in range(pp))
        self._ranks = rank_of_stage
        self._last = len(rank_of_stage) - 1
        self._done: set[tuple[bool, int, int]] = set()
        """Passes that have ended: True if forward, stage, micro batch."""
        self._used: dict[tuple[int, int], int] = {}
        """The number of gradients that a stage had used when it sent the output of a micro batch."""
        self._backward, self._sent = Counter[int](), Counter[int]()
        """Micro batches that have gone backward, and gradients that may still be under way, by stage."""
        self._flying, self._held = Counter[int](), Counter[int]()
        """In-flight micro batches and tensors, by rank."""

    def can_run(self, action: Action) -> bool:
        kind, stage, micro_batch, _ = action
        if kind == "F":
            return stage == 0 or (True, stage - 1, micro_batch) in self._done
        return kind == "W" or stage == self._last or (False, stage + 1, micro_batch) in self._done

    def run(self, action: Action) -> None:
        """Count what a pass receives, and what it sends."""
        kind, stage, micro_batch, _ = action
        rank, held = self._ranks[stage], self._held
        receives = stage > 0 and self._ranks[stage - 1] != rank
        sends = stage < self._last and self._ranks[stage + 1] != rank
        if kind == "F":
            self._flying[rank] += 1
            self._used[stage, micro_batch] = self._backward[stage]
            if receives:
                arrived = self._used[stage - 1, micro_batch] - self._backward[stage]
                held[rank] -= 1 + self._sent[stage] + arrived  # the input is in flight now
                self._sent[stage] = -arrived
        self.counts[rank].append((self._flying[rank], held[rank]))
        if kind == "F":
            if sends:
                held[rank] += 1
                held[self._ranks[stage + 1]] += 1
        elif kind != "W":
            self._backward[stage] += 1
            if receives:
                self._sent[stage] += 1
                held[rank] += 1
                held[self._ranks[stage - 1]] += 1
        if kind in ("B", "W"):
            self._flying[rank] -= 1
            held[rank] -= 2 * sends  # the output and its gradient
        if kind != "W":
            self._done.add((kind == "F", stage, micro_batch))
