"""The agreement of all ranks on a step at which to stop, or to save a checkpoint because of the time."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from nanoscale.runs.rank_context import StopFlag


class Agreement:
    """A collective question, once a step: was any rank asked to stop, and is a checkpoint due by rank 0's
    clock?

    One question carries both. It is sent before a step and answered before the next: a host is at most a step
    ahead of the others, and no device is synchronized.
    """

    def __init__(self, flag: StopFlag, save_every_s: float = 0.0) -> None:
        """Start the clock. `save_every_s`: seconds between two checkpoints; 0: none is saved by time."""
        self.save_is_due = False
        """True if all ranks save after the next step, because of the time."""
        self._flag = flag
        self._save_every_s = save_every_s
        self._since = time.monotonic()
        self._answer = torch.zeros(2)
        self._question: dist.Work | None = None
        self._saved_since_question = False

    def stops(self, failed: bool = False) -> bool:
        """True if all ranks stop now; the same answer on every rank. Call it before every step.

        `failed`: something other than the training has failed on this rank, and all ranks shall stop to check.
        """
        stop = self._flag.requested or failed
        save = 0 < self._save_every_s <= time.monotonic() - self._since
        if not dist.is_initialized():
            self.save_is_due = save
            return stop
        if self._question is not None:
            self._question.wait()
        any_rank_stops, rank0_saves = self._answer.tolist()
        self.save_is_due = bool(rank0_saves) and not self._saved_since_question
        self._saved_since_question = False
        if any_rank_stops:
            self._question = None
            return True
        self._answer.copy_(torch.tensor([stop, save and dist.get_rank() == 0]))
        self._question = dist.all_reduce(self._answer, dist.ReduceOp.MAX, async_op=True)
        return False

    def saved(self) -> None:
        """Restart the clock: a checkpoint was saved, and a pending request no longer counts."""
        self._since = time.monotonic()
        self._saved_since_question = self._question is not None

    def close(self) -> None:
        """Receive the last answer, which is not needed."""
        if self._question is not None:
            self._question.wait()
            self._question = None
