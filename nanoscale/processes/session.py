"""The meeting place of processes that another program has started: a file in the folder of runs.

The first process writes where its launcher listens, and at the end its exit code; the others read it. Only
their user may read it. A file of an earlier start is recognized by its age: its launcher touches it while it
runs.
"""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

_TOUCH_S = 5.0
STALE_S = 120.0
"""Seconds without a touch after which the launcher is lost."""
_SHOWN_S, LONGER_S = 2.0, 4.0
"""Seconds for which the exit code can be read, and for which its readers live on."""


@dataclass(frozen=True)
class Session:
    """The content of the file."""

    addresses: str = ""
    """The addresses at which the launcher listens; empty: none yet."""
    key_file: str = ""
    exit_code: int | None = None


def write(path: Path, session: Session) -> None:
    """Replace the file."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as stream:
        json.dump(asdict(session), stream)
    temporary.replace(path)


class Follower:
    """A reader of the file, which knows when nobody touches it any more."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._touched: float | None = None
        self._changed_at = time.monotonic()

    def read(self) -> Session | None:
        """Return what the file says; None if nobody writes it at present."""
        with suppress(OSError, ValueError, TypeError):
            touched = self._path.stat().st_mtime
            if touched != self._touched:
                is_first, self._touched = self._touched is None, touched
                # A file that exists already may be one of an earlier start.
                self._changed_at = time.monotonic() - (STALE_S - 2 * _TOUCH_S if is_first else 0)
            if time.monotonic() - self._changed_at < STALE_S:
                return Session(**json.loads(self._path.read_text(encoding="utf-8")))
        return None


class Keeper:
    """The writer of the file, from `with` to its end, when it says the exit code for a while."""

    def __init__(self, path: Path, others: bool) -> None:
        """`others`: other processes read the file."""
        self.exit_code = 1
        self._path, self._others = path, others
        self._closing = threading.Event()

    def __enter__(self) -> Keeper:
        write(self._path, Session())
        threading.Thread(target=self._touch, name="session", daemon=True).start()
        return self

    def _touch(self) -> None:
        while not self._closing.wait(_TOUCH_S):
            with suppress(OSError):
                self._path.touch()

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        with suppress(OSError):
            write(self._path, Session(exit_code=self.exit_code))
            time.sleep(_SHOWN_S if self._others else 0)
            self._path.unlink()
