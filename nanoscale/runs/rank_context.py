"""A rank and its run, as the job of the rank sees them."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from nanoscale.config.schema import Config
from nanoscale.runs.directory import RunDirectory

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopFlag:
    """Whether the run was asked to stop. The loop looks at it, agrees on a step and stops there."""

    def __init__(self) -> None:
        self.requested = False

    def listen(self) -> None:
        """Let the stop signals raise the flag, and do nothing else. Main thread only."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._raise)

    def _raise(self, _number: int, _frame: FrameType | None) -> None:
        self.requested = True


@dataclass(frozen=True)
class RankContext:
    """What a rank knows about itself and its run."""

    run: RunDirectory
    config: Config
    rank: int
    local_rank: int
    world_size: int
    host: str
    attempt: int
    """0 where no launcher has begun it, but torchrun"""
    stop: StopFlag

    @property
    def workspace(self) -> Path:
        return self.run.workspace(self.attempt)
