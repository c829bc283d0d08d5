"""The meeting place of processes that another program has started: a file in the folder of runs.

The first process writes where its launcher listens, and at the end its exit code; the others read it. Only
their user may read it. A file of an earlier start is recognized by its age: its launcher touches it while it
runs.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from nanoscale.common.errors import UserError
from nanoscale.processes.proc import is_alive

_TOUCH_S = 5.0
STALE_S, LOST_S = 120.0, 20.0
"""Seconds without a touch after which a launcher is lost, and one that does not answer either."""
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
    content = {**asdict(session), "pid": os.getpid(), "host": socket.gethostname()}
    temporary.touch(0o600)
    temporary.write_text(json.dumps(content), "utf-8")
    temporary.replace(path)


class Follower:
    """A reader of the file, which knows when nobody touches it any more."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._touched: float | None = None
        self._session: Session | None = None
        self._changed_at = time.monotonic()

    def read(self, limit_s: float | None = None) -> Session | None:
        """Return what the file says; None if nobody writes it at present.

        Args:
            limit_s: seconds without a touch after which the launcher is lost; None: STALE_S.
        """
        limit_s = STALE_S if limit_s is None else limit_s
        try:
            with self._path.open(encoding="utf-8") as stream:
                touched = os.fstat(
                    stream.fileno()
                ).st_mtime  # of an opened file, NFS asks the server
                session, writer_is_dead = _parsed(stream.read())
        except FileNotFoundError:
            self._session = None
        except (OSError, ValueError, TypeError, KeyError):
            pass  # NFS may fail once while the file is replaced: what was read before still holds
        else:
            if touched != self._touched:
                is_first, self._touched = self._touched is None, touched
                # A file that exists already may be one of an earlier start.
                self._changed_at = time.monotonic() - (STALE_S - 2 * _TOUCH_S if is_first else 0)
            self._session = None if writer_is_dead else session
        return self._session if time.monotonic() - self._changed_at < limit_s else None


def _parsed(text: str) -> tuple[Session, bool]:
    """Return the content of the file, and True if it was written by a process of this host that is dead."""
    content = json.loads(text)
    pid, host = content.pop("pid"), content.pop("host")
    return Session(**content), host == socket.gethostname() and not is_alive(pid)


def require_alone(path: Path) -> None:
    """Wait until it is clear that no other process keeps the file.

    Raises:
        UserError: another one does.
    """
    deadline, first = time.monotonic() + 2 * _TOUCH_S, None
    while time.monotonic() < deadline:
        try:
            session, writer_is_dead = _parsed(path.read_text("utf-8"))
            touched = path.stat().st_mtime
        except (OSError, ValueError, TypeError, KeyError):
            return
        if writer_is_dead or session.exit_code is not None:
            return
        first = touched if first is None else first
        if touched != first:
            what = "another start of the same command is running, and its processes meet at"
            raise UserError(
                "usage", f"launcher=env: {what} {path}; wait for its end, or set run.name"
            )
        time.sleep(_TOUCH_S / 10)


class Keeper:
    """The writer of the file, from `with` to its end, when it says the exit code for a while."""

    def __init__(self, path: Path, others: bool) -> None:
        """`others`: other processes read the file."""
        self.exit_code = 1
        self._path, self._others = path, others
        self._closing = threading.Event()

    def __enter__(self) -> Keeper:
        require_alone(self._path)
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
