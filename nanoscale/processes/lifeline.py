"""A process that must not outlive another: all processes of a job die with its launcher."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from nanoscale.processes.messages import MARK
from nanoscale.processes.proc import is_alive, is_tracker

SCRATCH, CGROUP = "NANOSCALE_SCRATCH", "NANOSCALE_CGROUP"
"""Names of the variables with the agent's temporary folder and the job's cgroup on the host."""

_POLL_S = 0.2
_PAUSE_S = 0.02
_KILL_S = 10.0


def die_with(pid: int, *, group: int) -> None:
    """Watch process `pid` from a thread; once it has ended, SIGKILL this process's group.

    Stopped processes of the group die as well. `group` is the group that holds only the job; a process in
    another one ends alone.
    """
    watcher = threading.Thread(
        target=_watch, args=(pid, group), name=f"lifeline-{pid}", daemon=True
    )
    watcher.start()


def _watch(pid: int, group: int) -> None:
    wait_until_gone(pid)
    clean_up(group, lost=True)
    if os.getpgid(0) == group:
        end_group(group)
    os.kill(os.getpid(), signal.SIGKILL)


def clean_up(group: int, *, lost: bool = False) -> None:
    """End processes of the job that have left the agent's process group, by its mark and its cgroup.

    Args:
        lost: the agent was killed, and its temporary files are removed for it. The caller may be in the
            cgroup, and ends with it.
    """
    from nanoscale.processes import cgroup, orphans, scratch

    if mark := os.environ.get(MARK):
        orphans.end_strays(mark, group)
    if lost and (folder := os.environ.get(SCRATCH)):
        scratch.remove(Path(folder), semaphores=not _has_tracker(group))
    if enclosure := os.environ.get(CGROUP):
        cgroup.kill(Path(enclosure))
        cgroup.remove(Path(enclosure))


def end_group(group: int) -> None:
    """SIGKILL all of a process group except the caller, and except Python's resource tracker.

    The tracker exits by itself after the others, and removes their semaphores first.
    """
    deadline = time.monotonic() + _KILL_S
    while others := [pid for pid in _members(group) if pid != os.getpid()]:
        if time.monotonic() > deadline:
            os.killpg(group, signal.SIGKILL)
        for pid in others:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_PAUSE_S)


def _members(group: int) -> Iterator[int]:
    """Yield the living processes of a group, without the resource tracker."""
    return (pid for pid in _living_members(group) if not is_tracker(pid))


def _has_tracker(group: int) -> bool:
    return any(map(is_tracker, _living_members(group)))


def _living_members(group: int) -> Iterator[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            stat = (folder / "stat").read_text("ascii", "replace")
            state, _parent, number = stat.rpartition(")")[2].split()[:3]
            if state not in ("Z", "X") and int(number) == group:
                yield int(folder.name)


def wait_until_gone(pid: int) -> None:
    """Block until process `pid` has ended, reaped or not."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # an old kernel, or not Linux
        while is_alive(pid):
            time.sleep(_POLL_S)
        return
    try:
        poller = select.poll()
        poller.register(handle, select.POLLIN)
        poller.poll()
    finally:
        os.close(handle)
