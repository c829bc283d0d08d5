"""The lock of a run: one launcher at a time on all hosts; an error names the holder to a second one.

A run directory has one token, a file that is created with it and never again: `lock` if nobody holds the run,
`lock.<random>` while a launcher holds it. To take the run, also from a dead launcher, a launcher renames the
token from the name that it has read to its own. If several try, the file system lets one succeed.

The holder writes its identity into the token, keeps a flock on it, and touches it every few seconds: its
heartbeat. A second launcher is refused if the flock is held. On some shared file systems a flock does not
reach other hosts, so a free one proves nothing; on the holder's own host its process shows whether it is
alive, and on another host the token's heartbeat over a few intervals. The clocks of two hosts are never
compared. The token's content proves nothing, since anybody may have written it: on the holder's own host a
process counts as the holder only while it has the token open for writing.

A holder that was suspended for longer finds the token missing at its next heartbeat at the latest. Before it
writes anything it calls `lost`, which sends a heartbeat first if the last one is not recent.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shlex
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from nanoscale.common import display
from nanoscale.common.errors import UserError, Violation, user_name
from nanoscale.common.json_text import parse
from nanoscale.common.units import clock
from nanoscale.processes.proc import kernel_id, start_ticks
from nanoscale.processes.scratch import flock
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.fence import MISSING_S
from nanoscale.runs.trust import is_own

BEAT_S = 3.0
PATIENCE_BEATS = 3
"""Heartbeats without which the holder is considered dead."""

_FREE_NAME = "lock"
_TRIES = 5
_PAUSE_S = 0.02
_POLL_S = 0.1
_SHOWN_S = 60.0
"""The greatest age of a heartbeat, by this host's clock, for a holder on another host to be shown."""
_MISSING = (errno.ENOENT, errno.ESTALE)
_TOKEN_NAME = re.compile(rf"{_FREE_NAME}(\..*)?")
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Owner:
    """The launcher that holds a run."""

    host: str
    pid: int
    user: str
    since: float
    """UNIX seconds."""
    command: str
    kernel: str = ""
    """The kernel, namespace and boot in which the process id is valid."""
    born: int | None = None
    """The start of the process, in the kernel's ticks: ids are reused."""

    @classmethod
    def me(cls) -> Owner:
        host, pid, command = socket.gethostname(), os.getpid(), shlex.join(sys.argv)
        return cls(host, pid, user_name(), time.time(), command, kernel_id("pid"), start_ticks(pid))

    @property
    def is_here(self) -> bool:
        """True if `pid` belongs to a present or past process of this host."""
        return self.pid > 0 and (self.host, self.kernel) == (socket.gethostname(), kernel_id("pid"))

    def __str__(self) -> str:
        since = clock(self.since)
        return f"process {self.pid} of {self.user} on {self.host} since {since} ({self.command})"


class TakenOverError(UserError):
    """Another launcher holds the run now, or its folder was moved."""


@dataclass(frozen=True)
class _Token:
    """A state of the token; equal as long as nobody touches or takes it."""

    name: str
    changed: int
    inode: int
    """The file's number; not its device, which differs between two mounts of one network file system."""
    owner: Owner

    @property
    def is_free(self) -> bool:
        return self.name == _FREE_NAME

    @property
    def is_held_here(self) -> bool:
        """True if the owner is a process of this host that has the token open."""
        return self.owner.is_here and _has_open(self.owner, self.inode)


class RunLock:
    """A lock of a run from `with` to its end, or until the process dies.

    Args:
        run: the run.
        folder: its temporary folder, if it is yet to be moved.

    Raises:
        UserError: another launcher holds it, or it cannot be locked.
    """

    def __init__(self, run: RunDirectory, folder: Path | None = None) -> None:
        self.run = run
        self._path = folder or run.path
        self._name = f"{_FREE_NAME}.{uuid.uuid4().hex[:12]}"
        self._folder = self._handle = -1
        self._last_beat = 0.0
        self._loss: TakenOverError | None = None
        self._missing_since: float | None = None
        self.heard: float | None = None
        """The last heartbeat of a previous holder that died, UNIX seconds; None: it released the run."""
        self._was_in_place = False
        """False also until a folder in preparation has been moved to its final path."""
        self._closing = threading.Event()

    def __enter__(self) -> RunLock:
        self._folder = _open_folder(self._path)
        try:
            self._acquire()
        except BaseException as error:
            os.close(self._folder)
            if isinstance(error, OSError):
                raise _unlockable(self._path, error) from error
            raise
        threading.Thread(target=self._beat_until_closed, name="lock", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        with suppress(OSError):  # another launcher may have it
            _rename(self._folder, self._name, _FREE_NAME)
        os.close(self._handle)
        os.close(self._folder)

    @property
    def lost(self) -> bool:
        """True if another launcher has taken the run, or its folder was moved."""
        # Nobody takes it within PATIENCE_BEATS of our last heartbeat.
        if self._loss is None and _now() - self._last_beat > 1.5 * BEAT_S:
            self._beat()
        return self._loss is not None

    def require(self) -> None:
        """Raise a TakenOverError if another launcher has taken the run, or its folder does not exist any
        more. While the folder is out of sight, this waits for it."""
        self._was_in_place = True
        self._beat()
        while self._missing_since is not None and self._loss is None:
            time.sleep(_POLL_S)
            self._beat()
        if self._loss is not None:
            raise self._loss

    def _acquire(self) -> None:
        dead_token: _Token | None = None
        while True:
            token, handle = self._read_and_lock()
            if (
                token.is_free
                or token == dead_token
                or (token.owner.is_here and not token.is_held_here)
            ):
                if self._rename_token(token, handle):
                    return
                continue
            os.close(handle)
            if token.owner.is_here:
                raise _held(self.run, token.owner)
            dead_token = token if self._is_unchanged(token) else None

    def _read_and_lock(self) -> tuple[_Token, int]:
        """Return the token, and a descriptor of it with a flock, if the file system has flocks."""
        for _ in range(_TRIES):
            token = _read_token(self._folder)
            with suppress(FileNotFoundError):
                handle = os.open(token.name, os.O_RDWR | os.O_CLOEXEC, dir_fd=self._folder)
                if flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB):
                    return token, handle
                os.close(handle)
            time.sleep(_PAUSE_S)  # others lock it briefly to read it
        raise _held(self.run, token.owner)

    def _rename_token(self, token: _Token, handle: int) -> bool:
        """True if the token is ours now; another process may have been faster."""
        self._last_beat = _now()
        try:
            with suppress(FileNotFoundError):
                _rename(self._folder, token.name, self._name)
            # A server whose answer was lost may deny its own rename: only the result counts.
            os.utime(self._name, dir_fd=self._folder)
        except OSError as error:
            os.close(handle)
            if error.errno in _MISSING:
                return False
            raise
        self._handle = handle
        self.heard = None if token.is_free else token.changed / 1e9
        record = json.dumps({"token": self._name, **asdict(Owner.me())}).encode()
        os.pwrite(handle, record, 0)
        os.ftruncate(handle, len(record))
        return True

    def _is_unchanged(self, token: _Token) -> bool:
        """True if the token of a holder on another host does not change, so that the holder must be dead.

        Raises:
            UserError: the holder is alive.
        """
        limit = PATIENCE_BEATS * BEAT_S
        text = f"{self.run.name} is held by {token.owner}; waiting up to {limit:g} s to see if it is alive"
        display.note(text)
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            time.sleep(_POLL_S)
            present = _read_token(self._folder)
            if present.name != token.name:
                return False
            if present.changed != token.changed:
                raise _held(self.run, present.owner)
        return True

    def _beat_until_closed(self) -> None:
        while not self._closing.wait(BEAT_S):
            self._beat()

    def _beat(self) -> None:
        now = _now()
        try:
            os.utime(self._name, dir_fd=self._folder)
            self._last_beat = now
            is_missing = not self._is_in_place()
            if is_missing and not self._was_in_place:
                return  # it is yet to be moved there
        except OSError as error:
            if error.errno not in _MISSING:
                return  # if the file server does not answer, nobody else can take the run either
            is_missing = True
        self._was_in_place = True
        if not is_missing:
            self._missing_since = None
        elif self._loss is None:
            self._missing_since = self._missing_since or now
            self._loss = self._loss_if_certain(now - self._missing_since)

    def _loss_if_certain(self, missing_s: float) -> TakenOverError | None:
        """Return the error for a run that this launcher has lost; None while its folder may come back."""
        with suppress(OSError):
            if _read_token(self._folder).name != self._name:
                return _taken_over(self.run, owner(self.run))
        if (what := _change_of(self._folder)) is None and missing_s > MISSING_S:
            what = f"out of sight for {MISSING_S:g} s, as if its file system were not mounted,", ""
        return None if what is None or self._is_in_place() else _missing_folder(self.run, *what)

    def _is_in_place(self) -> bool:
        """True if the folder of this lock is still at the run's path."""
        try:
            at_path, locked = self.run.path.stat(), os.fstat(self._folder)
        except OSError as error:
            return error.errno not in _MISSING
        return (at_path.st_dev, at_path.st_ino) == (locked.st_dev, locked.st_ino)


def owner(run: RunDirectory) -> Owner | None:
    """Return the present holder of the run; None if there is none.

    For a holder on another host, which flocks do not reach, this is a guess: only taking the lock is certain.
    """
    with suppress(OSError, UserError), _opened(run.path) as folder:
        token = _read_token(folder)
        if token.is_free:
            return None
        if token.owner.is_here:
            return token.owner if token.is_held_here else None
        is_recent = abs(time.time() - token.changed / 1e9) < _SHOWN_S
        return token.owner if is_recent or _is_locked(folder, token.name) else None
    return None


def last_beat(run: RunDirectory) -> float | None:
    """Return the time of the last heartbeat, UNIX seconds; None if the run was released or cannot be read."""
    with suppress(OSError, UserError), _opened(run.path) as folder:
        token = _read_token(folder)
        return None if token.is_free else token.changed / 1e9
    return None


def refuse_if_held(run: RunDirectory) -> None:
    """Raise a UserError if a launcher holds the run."""
    holder = owner(run)
    if holder is not None:
        raise _held(run, holder)


def terminate(run: RunDirectory, holder: Owner) -> None:
    """Send SIGTERM to the launcher that holds the run; do nothing if it no longer does, or if another user
    wrote its name into the run and it has not locked it.

    Raises:
        UserError: it is on another host, or another user's.
    """
    if not holder.is_here:
        command = shlex.join([sys.executable, "-m", "nanoscale", "runs", "stop", str(run.path)])
        is_host_name = _HOST.fullmatch(holder.host) is not None
        suggestions = (shlex.join(["ssh", holder.host, command]),) if is_host_name else ()
        rule = f"must be stopped on {holder.host}"
        violation = Violation("RUN", run.name, "command line", rule, suggestions)
        message = f"the run {run.name!r} is held from another host: by {holder}"
        raise UserError("run", message, [violation])
    with suppress(ProcessLookupError):
        process = os.pidfd_open(holder.pid)  # from here on the id cannot belong to another process
        try:
            if owner(run) == holder and (is_own(run) or _has_locked(run, holder.pid)):
                signal.pidfd_send_signal(process, signal.SIGTERM)
        except PermissionError as error:
            message = f"the run {run.name!r} can only be stopped by its user: {holder} holds it"
            raise UserError("run", message) from error
        finally:
            os.close(process)


def _read_token(folder: int) -> _Token:
    """Return the present token. A holder that has just taken it gets time to write its identity."""
    unknown_owner = Owner("an unknown host", 0, "an unknown user", 0.0, "unknown command")
    token = None
    for _ in range(_TRIES):
        with suppress(FileNotFoundError):  # it was renamed
            names = [name for name in os.listdir(folder) if _TOKEN_NAME.fullmatch(name)]
            name = max(names, default="")  # while it is released, both names may appear
            # Opened, since a client of a network file system then asks its server, and does not for a look.
            handle = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
            try:
                status = os.fstat(handle)
                holder = _read_owner(handle, name) or unknown_owner
                token = _Token(name, status.st_mtime_ns, status.st_ino, holder)
            finally:
                os.close(handle)
            if token.is_free or token.owner is not unknown_owner:
                return token
        time.sleep(_PAUSE_S)
    if token is None:
        raise FileNotFoundError(errno.ENOENT, "it has no file `lock`")
    return token


def _read_owner(handle: int, name: str) -> Owner | None:
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError):
        record = parse(os.read(handle, 65536))
        if record.pop("token") == name:  # not the previous holder's
            owner = Owner(**record)
            texts = (owner.host, owner.user, owner.command, owner.kernel)
            if all(isinstance(text, str) for text in texts) and type(owner.pid) is int:
                time.localtime(owner.since)  # raises an error unless it is a time
                return owner
    return None


def _has_open(owner: Owner, inode: int) -> bool:
    """True if the process has the file open for writing.

    The open files of another user's process are hidden: it is believed, and cannot be signalled from here.
    """
    if owner.born is None or start_ticks(owner.pid) != owner.born:
        return False
    try:
        return any(
            _is_open_for_writing(link, inode) for link in Path(f"/proc/{owner.pid}/fd").iterdir()
        )
    except PermissionError:
        return True
    except OSError:
        return False


def _has_locked(run: RunDirectory, pid: int) -> bool:
    """True if a process of this host has locked the run's token, which it may have open without a lock."""
    with _opened(run.path) as folder:
        inode = str(_read_token(folder).inode)
    try:
        locks = [line.split() for line in Path("/proc/locks").read_text("ascii").splitlines()]
    except OSError:  # a sandbox hides them
        return False
    return any(it[-4] == str(pid) and it[-3].rpartition(":")[2] == inode for it in locks)


def _is_open_for_writing(descriptor: Path, inode: int) -> bool:
    with suppress(OSError):
        if not descriptor.readlink().name.startswith(_FREE_NAME):
            return False  # so that no file on an unresponsive disk is accessed
        fdinfo = (descriptor.parent.with_name("fdinfo") / descriptor.name).read_text("ascii")
        flags = re.search(r"^flags:\s*([0-7]+)", fdinfo, re.M)
        writable = flags is not None and int(flags[1], 8) & os.O_ACCMODE != os.O_RDONLY
        return writable and descriptor.stat().st_ino == inode
    return False


def _is_locked(folder: int, name: str) -> bool:
    handle = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
    try:
        return not flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    finally:
        os.close(handle)


def _rename(folder: int, old: str, new: str) -> None:
    os.rename(old, new, src_dir_fd=folder, dst_dir_fd=folder)


def _open_folder(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _unlockable(path, error) from error


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    folder = _open_folder(path)
    try:
        yield folder
    finally:
        os.close(folder)


def _now() -> float:
    """Return seconds, including the machine's sleep."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _unlockable(path: Path, error: OSError) -> UserError:
    is_missing = error.errno in _MISSING
    rule = "must exist" if is_missing else "must be a file that can be written"
    remedy = (shlex.join(["touch", str(path / _FREE_NAME)]),) if is_missing else ()
    violation = Violation("RUN", str(path / _FREE_NAME), "", rule, remedy)
    return UserError("run", f"the run cannot be locked: {error.strerror}", [violation])


def _held(run: RunDirectory, owner: Owner) -> UserError:
    suggestions = (_command("logs", run, "--follow"), _command("stop", run))
    violation = Violation("RUN", run.name, "", "has one launcher at a time", suggestions)
    message = f"the run {run.name!r} is already running: {owner} holds it"
    return UserError("run", message, [violation])


def _change_of(folder: int) -> tuple[str, str] | None:
    """Return what happened to an open folder, and its new path if it was renamed; None if it is unknown."""
    with suppress(OSError):
        if not os.fstat(folder).st_nlink:
            return "deleted", ""
        path = Path(f"/proc/self/fd/{folder}").readlink()
        if os.path.samestat(path.stat(), os.fstat(folder)):
            return f"renamed to {path}", str(path)
    return None


def _missing_folder(run: RunDirectory, what: str, path: str) -> TakenOverError:
    """Return the error for a run whose folder was deleted, or renamed to `path`, or is out of sight."""
    what += " while the run was running; its ranks were terminated"
    message = f"the folder of the run {run.name!r} was {what}"
    suggestions = (f"nanoscale resume {shlex.quote(path)}",) if path else ()
    rule = "must not be moved while a launcher uses it"
    return TakenOverError("run", message, [Violation("RUN", str(run.path), "", rule, suggestions)])


def _taken_over(run: RunDirectory, taker: Owner | None) -> TakenOverError:
    limit = PATIENCE_BEATS * BEAT_S
    holder_text = f"by {taker}" if taker else "by another launcher, which has ended"
    message = (
        f"the run {run.name!r} was taken over {holder_text}, because this launcher gave no heartbeat for "
        f"{limit:g} s: it was suspended, or cut off from the disk; it has terminated its ranks and "
        "written nothing more"
    )
    suggestions = (_command("logs", run, "--follow"),)
    violation = Violation("RUN", run.name, "", "has one launcher at a time", suggestions)
    return TakenOverError("run", message, [violation])


def _command(verb: str, run: RunDirectory, *options: str) -> str:
    return shlex.join(["nanoscale", "runs", verb, run.reference, *options])
