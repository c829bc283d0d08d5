"""Processes that carry a job's mark in their environment, or are in its cgroup, in any session."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from nanoscale.processes import cgroup, scratch
from nanoscale.processes.messages import MARK
from nanoscale.processes.proc import environment, is_alive, is_tracker

_LIMIT_S = 5.0
_TRACKER_S = 3.0
"""Seconds for Python's resource tracker to remove semaphores that are no longer used."""
_PAUSE_S = 0.02


def marked(mark: str) -> Iterator[int]:
    """Yield the living processes of a job that this user can see, without the caller."""
    variable = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        with suppress(OSError):
            has_mark = variable in environment(pid)
            if pid != os.getpid() and (has_mark or cgroup.contains(mark, folder)) and is_alive(pid):
                yield pid


def end_orphans(mark: str) -> list[int]:
    """SIGKILL every process of a job, and the agent that leads their group; remove their files.

    Ranks exit with their agent by a thread of their own, which does not run in a stopped rank; and an agent
    that was stopped itself ends nothing.

    Returns:
        the processes that did not exit.
    """
    remaining = end(lambda: _with_leaders(mark), tracker_s=0.0)
    scratch.remove_stale()
    return remaining


def end_strays(mark: str, group: int) -> None:
    """SIGKILL every process of a job that has left its process group."""
    end(lambda: [pid for pid in marked(mark) if _group_of(pid) not in (group, None)])


def end(
    find: Callable[[], Iterable[int]], limit_s: float = _LIMIT_S, tracker_s: float = _TRACKER_S
) -> list[int]:
    """SIGKILL all that `find` returns, until it returns no process any more, or for at most so long.

    Args:
        tracker_s: how long Python's resource trackers are left alone.

    Returns:
        the processes that did not exit.
    """
    start = time.monotonic()
    while remaining := list(find()):
        waited = time.monotonic() - start
        if waited > limit_s:
            break
        for pid in remaining:
            if waited >= tracker_s or not is_tracker(pid):
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(_PAUSE_S)
    return remaining


def _with_leaders(mark: str) -> set[int]:
    """Find processes by their mark: an agent has it only from an order, so it is in the environment of its
    children."""
    processes = set(marked(mark))
    leaders = {group for pid in processes if (group := _group_of(pid)) is not None}
    return processes | {pid for pid in leaders - {os.getpgid(0)} if is_alive(pid)}


def _group_of(pid: int) -> int | None:
    with suppress(OSError):
        return os.getpgid(pid)
    return None
