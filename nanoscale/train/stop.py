"""Stopping between two steps, all ranks at the same one."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist


class Flag(Protocol):
    """Set from a signal handler at any time."""

    requested: bool


class StopAgreement:
    """Asks once a step whether any rank was told to stop.

    The question is sent off before a step and answered before the next, so that nobody waits for it and the
    device is never synchronised.
    """

    def __init__(self, flag: Flag) -> None:
        self._flag = flag
        self._anybody = torch.zeros(1)
        self._question: dist.Work | None = None

    def reached(self, failed: bool = False) -> bool:
        """Whether to stop now; the same answer on every rank. Call it before every step.

        `failed`: something of this rank beside the training has gone wrong, and all shall stop to see.
        """
        wanted = self._flag.requested or failed
        if not dist.is_initialized():
            return wanted
        if self._question is not None:
            self._question.wait()
        if self._anybody.item() > 0:
            self._question = None
            return True
        self._anybody.fill_(float(wanted))
        self._question = dist.all_reduce(self._anybody, dist.ReduceOp.MAX, async_op=True)
        return False

    def close(self) -> None:
        """Take in the answer that nobody needs any more."""
        if self._question is not None:
            self._question.wait()
            self._question = None
