"""The end of all processes of a job with its launcher, however the launcher ends.

Processes watch their parent, belong to its process group, and carry the job's mark in their environment. They
are in a cgroup of the job (version 2) if the system has delegated one, as in a container with a cgroup of its
own or under `systemd-run --user --scope -p Delegate=yes`.
"""

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from nanoscale.processes import scratch
from nanoscale.processes.messages import MARK
from nanoscale.processes.proc import all_pids, environment, is_alive, is_tracker

SCRATCH, CGROUP, MEMORY = "NANOSCALE_SCRATCH", "NANOSCALE_CGROUP", "NANOSCALE_MEMORY"
"""Names of the variables with the agent's temporary folder, the job's cgroup on the host, and the agent's
folder for checkpoints in memory."""

_POLL_S = 0.2
_PAUSE_S = 0.02
_LIMIT_S = 5.0
_GROUP_LIMIT_S = 10.0
_TRACKER_S = 3.0
"""Seconds for Python's resource tracker to remove semaphores that are no longer used."""
_CGROUP_PREFIX = "nanoscale-"
_EMPTY_S = 2.0
_STALE_S = 60.0


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
    if mark := os.environ.get(MARK):
        end_strays(mark, group)
    if lost and (folder := os.environ.get(SCRATCH)):
        has_tracker = any(map(is_tracker, _members(group)))
        scratch.remove(Path(folder), semaphores=not has_tracker)
        if memory := os.environ.get(MEMORY):
            scratch.remove(Path(memory), semaphores=False)
    if enclosure := os.environ.get(CGROUP):
        end_cgroup(Path(enclosure))


def end_group(group: int) -> None:
    """SIGKILL all of a process group except the caller, and except Python's resource tracker.

    The tracker exits by itself after the others, and removes their semaphores first.
    """

    def others() -> list[int]:
        return [pid for pid in _members(group) if pid != os.getpid() and not is_tracker(pid)]

    if end(others, _GROUP_LIMIT_S):
        os.killpg(group, signal.SIGKILL)


def _members(group: int) -> Iterator[int]:
    return (pid for pid in all_pids() if _group_of(pid) == group and is_alive(pid))


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


# --- processes of a job, by its mark or its cgroup ------------------------------------------------


def marked(mark: str) -> Iterator[int]:
    """Yield the living processes of a job that this user can see, without the caller."""
    variable = f"{MARK}={mark}".encode()
    for pid in all_pids():
        with suppress(OSError):
            has_mark = variable in environment(pid)
            if pid != os.getpid() and (has_mark or _is_in_cgroup(mark, pid)) and is_alive(pid):
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


# --- a job's cgroup ---------------------------------------------------------------------------------


def create_cgroup(name: str) -> Path | None:
    """Return a new cgroup below this process's cgroup; None if none was delegated."""
    parent = _own_cgroup()
    if parent is None or not os.access(parent / "cgroup.procs", os.W_OK):
        return None
    for stale in parent.glob(f"{_CGROUP_PREFIX}*"):  # of killed agents; one with a process stays
        with suppress(OSError):
            if time.time() - stale.stat().st_mtime > _STALE_S:
                stale.rmdir()
    folder = parent / f"{_CGROUP_PREFIX}{name}"
    with suppress(OSError):
        folder.mkdir(exist_ok=True)
        if (folder / "cgroup.kill").exists():  # since Linux 5.14
            return folder
        folder.rmdir()
    return None


def join_cgroup(folder: Path, pid: int) -> bool:
    """Move a process, with all that it starts from now on, into a cgroup; False if that is not permitted."""
    try:
        (folder / "cgroup.procs").write_text(str(pid), "utf-8")
    except OSError:
        return False
    return True


def end_cgroup(folder: Path) -> None:
    """SIGKILL all processes of a cgroup, and remove it once they have ended."""
    with suppress(OSError):
        (folder / "cgroup.kill").write_text("1", "utf-8")
    deadline = time.monotonic() + _EMPTY_S
    while folder.exists() and time.monotonic() < deadline:
        with suppress(OSError):
            folder.rmdir()
            return
        time.sleep(_PAUSE_S)


def _is_in_cgroup(name: str, pid: int) -> bool:
    with suppress(OSError):
        memberships = Path(f"/proc/{pid}/cgroup").read_text("utf-8", "surrogateescape")
        return f"/{_CGROUP_PREFIX}{name}" in memberships
    return False


def _own_cgroup() -> Path | None:
    with suppress(OSError, StopIteration):
        memberships = Path("/proc/self/cgroup").read_text("utf-8", "surrogateescape").splitlines()
        path = next(line[3:] for line in memberships if line.startswith("0::"))
        mounts = Path("/proc/mounts").read_text("utf-8", "surrogateescape").splitlines()
        root = next(mount[1] for mount in map(str.split, mounts) if mount[2] == "cgroup2")
        return Path(root) / path.lstrip("/")
    return None
