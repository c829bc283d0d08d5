"""Processes that this machine runs for a job, and their certain end."""

import ctypes
import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import BinaryIO, cast

from nanoscale.processes import lifeline
from nanoscale.processes.proc import is_alive

_PAUSE_S = 0.02
_PIPE_BYTES = 1 << 20
_END_S = 30.0
_PR_SET_CHILD_SUBREAPER = 36
_CLEANUP_S = 3.0
"""Seconds; a host that is off or unreachable would never answer, and its agent exits by itself."""


class Process:
    """A command in a session of its own.

    It is not reaped before `reap`, so its number means this session until then.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._code: int | None = None
        self._popen = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.pid = self._popen.pid
        pipes = (self._popen.stdin, self._popen.stdout, self._popen.stderr)
        self.stdin, self.stdout, self.stderr = (cast("BinaryIO", pipe) for pipe in pipes)
        # The ranks' output comes this way; some systems do not support it.
        with suppress(OSError, AttributeError):
            fcntl.fcntl(self.stdout, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    def exit_code(self) -> int | None:
        """Return the exit code; negative: the signal that ended it; None while it runs."""
        if self._code is None:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                exited = ended.si_code == os.CLD_EXITED
                self._code = ended.si_status if exited else -ended.si_status
        return self._code

    def kill(self, *, alone: bool = False) -> None:
        """End it, and unless `alone` also the processes that it started in its session."""
        if self.exit_code() is None:
            with suppress(ProcessLookupError):
                (os.kill if alone else os.killpg)(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the pipes, which otherwise stay open after the command has ended."""
        for pipe in (self.stdin, self.stdout, self.stderr):
            with suppress(OSError):
                pipe.close()

    def reap(self) -> None:
        self.close()
        self._code = self._popen.wait()


class OrphanCleanup:
    """Commands that end what a lost agent has left on its host: in parallel, and briefly."""

    def __init__(self) -> None:
        self._running: list[tuple[Process, float]] = []

    def begin(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        with suppress(OSError):
            deadline = time.monotonic() + _CLEANUP_S
            self._running.append((Process(command, environment), deadline))

    def finish(self) -> None:
        """Wait for the running commands, and give up commands that take too long."""
        for process, deadline in self._running:
            while process.exit_code() is None and time.monotonic() < deadline:
                time.sleep(_PAUSE_S)
            process.kill()
            process.reap()
        self._running.clear()


def end_all(sessions: Sequence[int], mark: str) -> list[int]:
    """End every process of these sessions, and all that carry the mark, including stopped ones.

    Returns:
        the processes that did not exit.
    """
    remaining = lifeline.end(lambda: members(sessions, mark), _END_S)
    _reap_orphans(sessions)
    return remaining


def members(sessions: Sequence[int], mark: str) -> list[int]:
    """List living processes of the sessions, and those with the mark, unless it is empty, that left them."""
    import psutil

    marked = set(lifeline.marked(mark)) if mark else set()
    return [pid for pid in psutil.pids() if pid in marked or _is_of(sessions, pid)]


def adopt_orphans(adopt: bool = True) -> None:
    """Become the parent of orphaned descendants, or stop being it: in many containers nobody else would reap
    them."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(adopt))


def _is_of(sessions: Sequence[int], pid: int) -> bool:
    with suppress(OSError):
        return os.getsid(pid) in sessions and is_alive(pid)
    return False


def _reap_orphans(sessions: Sequence[int]) -> None:
    """Reap the sessions' processes that became our children when their parent exited."""
    import psutil

    for child in psutil.Process().children():
        with suppress(OSError):
            if child.pid not in sessions and os.getsid(child.pid) in sessions:
                os.waitpid(child.pid, os.WNOHANG)
