"""A process that must not outlive another: everything of a job dies with its launcher."""

from __future__ import annotations

import os
import select
import signal
import threading
import time

_POLL_S = 0.2


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
        os.killpg(group, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


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
