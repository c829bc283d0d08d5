"""The launcher's own signals: recorded, and handled between two checks of the job."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGTSTP)
_TERMINATING = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def unwinding() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the body, as Ctrl-C does, and then end the process.

    The exit code is a shell's for the signal: 128 and its number. Main thread only.
    """
    previous_handlers = {number: signal.getsignal(number) for number in _TERMINATING}
    for number in _TERMINATING:
        if previous_handlers[number] is not signal.SIG_IGN:
            signal.signal(number, _unwind)
    try:
        yield
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def _unwind(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


class Signals:
    """A listener for Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 from `with` to its end. Main thread only.

    Ctrl-Z does not suspend the launcher meanwhile: the hosts would consider it lost. A signal that was ignored
    before stays ignored, as under nohup.
    """

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        """The first signal that came."""
        self.kill_requested = False
        """True if Ctrl-C came after another signal."""
        self.suspended = False
        """True if Ctrl-Z came."""
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> Signals:
        for number in _HANDLED:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self.record)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def record(self, number: int, _frame: FrameType | None = None) -> None:
        if number == signal.SIGTSTP:
            self.suspended = True
        elif self.first is None:
            self.first = signal.Signals(number)
        elif number == signal.SIGINT:
            self.kill_requested = True
