"""The agreement of all ranks on a step at which to stop, to save because of the time, or to wait for data."""

import time

import torch
import torch.distributed as dist

from nanoscale.runs.rank_context import StopFlag


class Agreement:
    """A collective question, once a step: was any rank asked to stop, does any rank lack data, and is a
    checkpoint due by rank 0's clock?

    One question carries all. It is sent before a step and answered before the next: a host is at most a step
    ahead of the others, and no device is synchronized.
    """

    def __init__(
        self, flag: StopFlag, save_every_s: float = 0.0, may_lack_data: bool = False
    ) -> None:
        """Start the clock.

        Args:
            save_every_s: seconds between two checkpoints; 0: none is saved by time.
            may_lack_data: True if a step may have to wait for data.
        """
        self.save_is_due = False
        """True if all ranks save after the next step, because of the time."""
        self.lacks_data = may_lack_data  # until the first answer
        """True if all ranks ask again before the next step, because data is missing on one."""
        self.moves = False
        """True if all ranks stop for a change of hosts."""
        self._flag = flag
        self._save_every_s = save_every_s
        self._since = time.monotonic()
        self._answer = torch.tensor([0.0, 0.0, float(may_lack_data)])
        self._question: dist.Work | None = None
        self._saved_since_question = False

    def stops(self, failed: bool = False, lacks_data: bool = False) -> bool:
        """True if all ranks stop now; the same answer on every rank. Call it before every step.

        `moves` is then True if no rank was asked for more than a stop for a change of hosts.

        Args:
            failed: something other than the training has failed on this rank, and all ranks shall stop to
                check.
            lacks_data: this rank cannot read the samples of this step and of the next one yet.
        """
        stop = 2 if self._flag.requested or failed else 1 if self._flag.moves else 0
        save = 0 < self._save_every_s <= time.monotonic() - self._since
        if not dist.is_initialized():
            self.save_is_due, self.lacks_data, self.moves = save, lacks_data, stop == 1
            return stop > 0
        if self._question is not None:
            self._question.wait()
        any_rank_stops, rank0_saves, any_rank_lacks = self._answer.tolist()
        self.lacks_data = bool(any_rank_lacks)
        self.save_is_due = bool(rank0_saves) and not self._saved_since_question
        self._saved_since_question = False
        if any_rank_stops:
            self.moves = any_rank_stops == 1
            self._question = None
            return True
        self._answer.copy_(torch.tensor([stop, save and dist.get_rank() == 0, lacks_data]))
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
