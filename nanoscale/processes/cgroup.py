"""A job's cgroup (version 2), if the system has delegated one: all of its processes can be ended together.

This needs only the rights to create a folder in the cgroup of this process and to move processes into it, as
in a container with a cgroup of its own or under `systemd-run --user --scope -p Delegate=yes`.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

PREFIX = "nanoscale-"
_EMPTY_S = 2.0
_PAUSE_S = 0.01
_STALE_S = 60.0


def create(name: str) -> Path | None:
    """Return a new cgroup below that of this process; None if none was delegated."""
    parent = _own_cgroup()
    if parent is None or not os.access(parent / "cgroup.procs", os.W_OK):
        return None
    _remove_stale(parent)
    folder = parent / f"{PREFIX}{name}"
    with suppress(OSError):
        folder.mkdir(exist_ok=True)
        if (folder / "cgroup.kill").exists():  # since Linux 5.14
            return folder
        folder.rmdir()
    return None


def add(folder: Path, pid: int) -> bool:
    """Move a process, with all that it starts from now on, into a cgroup; False if that is not permitted."""
    try:
        (folder / "cgroup.procs").write_text(str(pid), encoding="utf-8")
    except OSError:
        return False
    return True


def kill(folder: Path) -> None:
    """SIGKILL all processes of a cgroup."""
    with suppress(OSError):
        (folder / "cgroup.kill").write_text("1", encoding="utf-8")


def remove(folder: Path) -> None:
    """Remove a cgroup whose processes were killed, once they have ended."""
    deadline = time.monotonic() + _EMPTY_S
    while folder.exists() and time.monotonic() < deadline:
        with suppress(OSError):
            folder.rmdir()
            return
        time.sleep(_PAUSE_S)


def contains(name: str, process: Path) -> bool:
    """True if a process, by its folder in /proc, is in the cgroup of that name."""
    with suppress(OSError):
        return f"/{PREFIX}{name}" in (process / "cgroup").read_text("utf-8", "surrogateescape")
    return False


def _own_cgroup() -> Path | None:
    """Return the folder of this process's cgroup."""
    with suppress(OSError, StopIteration):
        memberships = Path("/proc/self/cgroup").read_text("utf-8", "surrogateescape").splitlines()
        path = next(line[3:] for line in memberships if line.startswith("0::"))
        mounts = [
            line.split()
            for line in Path("/proc/mounts").read_text("utf-8", "surrogateescape").splitlines()
        ]
        root = next(mount[1] for mount in mounts if mount[2] == "cgroup2")
        return Path(root) / path.lstrip("/")
    return None


def _remove_stale(parent: Path) -> None:
    """Remove the cgroups of killed agents; a cgroup that has a process cannot be removed."""
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime > _STALE_S:
                folder.rmdir()
