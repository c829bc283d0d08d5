"""Processes that carry a job's mark in their environment, or are in its cgroup, in any session."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from nanoscale.processes import cgroup
from nanoscale.processes.messages import MARK

LIMIT_S = 5.0
_TRACKER_S = 3.0
"""Seconds for Python's resource tracker to remove semaphores that are no longer used."""
_PAUSE_S = 0.02


def marked(mark: str) -> Iterator[int]:
    """Yield the living processes of a job that this user can see, without the caller."""
    variable = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        with suppress(OSError):
            carries = variable in (folder / "environ").read_bytes().split(b"\0")
            if pid != os.getpid() and (carries or cgroup.contains(mark, folder)) and lives(pid):
                yield pid


def end_strays(mark: str, group: int) -> None:
    """SIGKILL every process of a job that has left its process group."""
    began = time.monotonic()
    while strays := [pid for pid in marked(mark) if _group(pid) not in (group, None)]:
        waited = time.monotonic() - began
        if waited > LIMIT_S:
            return
        for pid in strays:
            if waited > _TRACKER_S or not is_tracker(pid):
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(_PAUSE_S)


def _group(pid: int) -> int | None:
    with suppress(OSError):
        return os.getpgid(pid)
    return None


def lives(pid: int) -> bool:
    """True if a process has not ended; an unreaped one has."""
    with suppress(OSError, IndexError):
        stat = Path(f"/proc/{pid}/stat").read_text("ascii", "replace")
        return stat.rpartition(")")[2].split()[0] not in ("Z", "X")
    return False


_TRACKER = b"multiprocessing.resource_tracker"


def is_tracker(pid: int) -> bool:
    """True if a process is Python's resource tracker, which exits by itself when it is not needed."""
    with suppress(OSError):
        return _TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False
