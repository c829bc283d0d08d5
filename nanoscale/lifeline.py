"""A process that must not outlive another: everything of a job dies with its launcher."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_POLL_S = 0.2
_PAUSE_S = 0.02
_KILL_S = 10.0
_TRACKER = b"multiprocessing.resource_tracker"


def die_with(pid: int, *, group: int) -> None:
    """Watch process `pid` from a thread; once it is gone, SIGKILL this process's group.

    Stopped processes of the group die as well. `group` is the group that holds nothing but the
    job; a process that is in another one ends alone.
    """
    watcher = threading.Thread(
        target=_watch, args=(pid, group), name=f"lifeline-{pid}", daemon=True
    )
    watcher.start()


def _watch(pid: int, group: int) -> None:
    wait_until_gone(pid)
    if os.getpgid(0) == group:
        end_group(group)
    os.kill(os.getpid(), signal.SIGKILL)


def end_group(group: int) -> None:
    """SIGKILL all of a process group but the caller, and but Python's resource tracker.

    The tracker ends by itself when the others are gone, and removes their semaphores first.
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
    """The living processes of a group, without the resource tracker."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, _parent, number = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            if state in ("Z", "X") or int(number) != group:
                continue
            if _TRACKER not in (folder / "cmdline").read_bytes():
                yield int(folder.name)


def wait_until_gone(pid: int) -> None:
    """Block until process `pid` has ended, reaped or not."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # an old kernel, or not Linux
        _poll_until_gone(pid)
        return
    try:
        poller = select.poll()
        poller.register(handle, select.POLLIN)
        poller.poll()
    finally:
        os.close(handle)


def _poll_until_gone(pid: int) -> None:
    while _is_alive(pid):
        time.sleep(_POLL_S)


def _is_alive(pid: int) -> bool:
    import psutil

    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
