"""The context of a rank's job: its identity, its run and the flag to stop."""

import signal
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from nanoscale.config.resolved import ResolvedConfig
from nanoscale.runs.directory import RunDirectory

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
MOVE_SIGNAL = signal.SIGURG
"""The signal to stop for a change of hosts; a process that does not listen ignores it."""


class StopFlag:
    """A flag that is set when the run is asked to stop. The loop reads it, agrees on a step and stops there."""

    moves = False
    """True if the run is asked to stop for a change of hosts, after which it continues at once."""

    def __init__(self) -> None:
        self.requested = False

    def listen(self) -> None:
        """Let the stop signals set the flag, and do nothing else. Main thread only."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._raise)
        signal.signal(MOVE_SIGNAL, self._move)

    def _raise(self, _number: int, _frame: FrameType | None) -> None:
        self.requested = True

    def _move(self, _number: int, _frame: FrameType | None) -> None:
        self.moves = True


@dataclass(frozen=True)
class RankContext:
    """A rank's identity and its run."""

    run: RunDirectory
    config: ResolvedConfig
    rank: int
    local_rank: int
    world_size: int
    host: str
    attempt: int
    """0 if torchrun started it, without a launcher."""
    stop: StopFlag

    @property
    def workspace(self) -> Path:
        return self.run.workspace(self.attempt)
