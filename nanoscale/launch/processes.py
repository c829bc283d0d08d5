"""The processes of a job on this host, and the certainty that none is left."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

_MARK = "NANOSCALE_JOB"
_PAUSE_S = 0.02
_PR_SET_CHILD_SUBREAPER = 36
_TRACKER_S = 3.0
"""how long Python's resource tracker may take to remove semaphores once nobody uses them"""


class Job:
    """A command in a session of its own, with all that it starts.

    Its first process is not reaped before `end`, so its number means this session until then.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        _adopt_orphans()
        self._mark = uuid.uuid4().hex
        self._code: int | None = None
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                env={
                    **os.environ,
                    **environment,
                    "NANOSCALE_LAUNCHER_PID": str(os.getpid()),
                    _MARK: self._mark,
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        """Of the first process; negative: the signal that ended it; None while it runs."""
        if self._code is None:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                exited = ended.si_code == os.CLD_EXITED
                self._code = ended.si_status if exited else -ended.si_status
        return self._code

    def wait(self, seconds: float) -> None:
        """Wait for the end of the first process, so long at most."""
        try:
            handle = os.pidfd_open(self.pid)
        except (AttributeError, OSError):
            time.sleep(seconds)
            return
        try:
            select.select([handle], [], [], seconds)
        finally:
            os.close(handle)

    def stop(self) -> None:
        """Ask the first process to end in good order."""
        if self.exit_code() is None:
            os.kill(self.pid, signal.SIGTERM)

    def end(self, limit_s: float = 30.0) -> list[int]:
        """End every process that is left, stopped ones too; those that would not go."""
        deadline = time.monotonic() + limit_s
        patience = time.monotonic() + _TRACKER_S
        while left := self._members():
            if time.monotonic() > deadline:
                break
            workers = [process for process in left if not _is_tracker(process)]
            for process in workers if time.monotonic() < patience else left:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(process.pid, signal.SIGKILL)
            time.sleep(_PAUSE_S)
        if self.exit_code() is not None:
            self._reap_orphans()
            self._process.wait()
        return [process.pid for process in left]

    def _reap_orphans(self) -> None:
        """Take leave of the session's processes that have come to us with their parent's death."""
        import psutil

        for child in psutil.Process().children():
            with suppress(OSError):
                if child.pid != self.pid and os.getsid(child.pid) == self.pid:
                    os.waitpid(child.pid, os.WNOHANG)

    def _members(self) -> list[psutil.Process]:
        """Living processes of the session, or that carry its mark after they left it."""
        import psutil

        return [process for process in psutil.process_iter() if self._has(process)]

    def _has(self, process: psutil.Process) -> bool:
        import psutil

        try:
            ours = os.getsid(process.pid) == self.pid
            ours = ours or process.environ().get(_MARK) == self._mark
            return ours and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.Error, OSError):
            return False


def _adopt_orphans() -> None:
    """Become the parent of orphaned descendants: in many containers nobody else would reap them."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _is_tracker(process: psutil.Process) -> bool:
    import psutil

    try:
        return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
    except psutil.Error:
        return False
