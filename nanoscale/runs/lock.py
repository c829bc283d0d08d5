"""The lock of a run: one launcher at a time, named to whoever comes second."""

from __future__ import annotations

import fcntl
import getpass
import json
import os
import shlex
import socket
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from nanoscale.errors import UserError, Violation
from nanoscale.runs.directory import RunDirectory

_TRIES = 5
_PAUSE_S = 0.02


@dataclass(frozen=True)
class Owner:
    """The launcher that holds a run."""

    host: str
    pid: int
    user: str
    since: float
    """UNIX seconds"""
    command: str

    @classmethod
    def me(cls) -> Owner:
        return cls(socket.gethostname(), os.getpid(), _user(), time.time(), shlex.join(sys.argv))

    @property
    def is_here(self) -> bool:
        """Whether its process can be reached from this host."""
        return self.host == socket.gethostname() and self.pid > 0

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} of {self.user} on {self.host} since {since} ({self.command})"


class RunLock:
    """Holds a run from `with` to its end, or until the process dies.

    Raises:
        UserError: another launcher holds it.
    """

    def __init__(self, run: RunDirectory, name: str | None = None) -> None:
        self._path = run.lock
        self._name = name or run.name
        self._handle: int | None = None

    def __enter__(self) -> RunLock:
        handle = _open(self._path)
        if not _acquire(handle):
            owner = _read_owner(handle)
            os.close(handle)
            raise _held(self._name, owner)
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(asdict(Owner.me())).encode(), 0)
        self._handle = handle
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._handle is not None:
            os.ftruncate(self._handle, 0)
            os.close(self._handle)
            self._handle = None


def owner(run: RunDirectory) -> Owner | None:
    """Who holds the run now; None where nobody does."""
    try:
        handle = os.open(run.lock, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read_owner(handle)
    finally:
        os.close(handle)
    return None


def refuse_if_held(run: RunDirectory) -> None:
    """Raise a UserError where a launcher holds the run."""
    holder = owner(run)
    if holder is not None:
        raise _held(run.name, holder)


def require_here(run: RunDirectory, holder: Owner) -> None:
    """Raise a UserError where the launcher cannot be reached from this host."""
    if holder.is_here:
        return
    raise UserError(
        "run",
        f"the run {run.name!r} is held from another host: by {holder}",
        [
            Violation(
                "RUN",
                run.name,
                "command line",
                f"must be stopped on {holder.host}",
                (f"ssh {holder.host} kill {holder.pid}",),
            )
        ],
    )


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise UserError(
            "run",
            f"the run cannot be locked: {error.strerror}",
            [Violation("RUN", str(path), "", "must be a file that can be written")],
        ) from error


def _acquire(handle: int) -> bool:
    """Take the lock. Somebody who only looks at it holds it for a moment, so one try is too few."""
    for _ in range(_TRIES):
        with suppress(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(_PAUSE_S)
    return False


def _read_owner(handle: int) -> Owner:
    unknown = Owner("an unknown host", 0, "an unknown user", 0.0, "unknown command")
    with suppress(OSError, ValueError, TypeError):
        return Owner(**json.loads(os.pread(handle, 65536, 0)))
    return unknown


def _held(name: str, owner: Owner) -> UserError:
    return UserError(
        "run",
        f"the run {name!r} is going on: {owner} holds it",
        [
            Violation(
                "RUN",
                name,
                "",
                "has one launcher at a time",
                (f"nanoscale runs logs {name} --follow", f"nanoscale runs stop {name}"),
            )
        ],
    )


def _user() -> str:
    with suppress(KeyError, OSError):
        return getpass.getuser()
    return str(os.getuid())
