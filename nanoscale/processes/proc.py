"""Facts about processes and memory that Linux shows in /proc."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from pathlib import Path

_TRACKER = b"multiprocessing.resource_tracker"
_EXEC_S = 1.0
_MEMORY, _ENVIRONMENT_START, _ENVIRONMENT_END = 20, 47, 48
"""Places of vsize, env_start and env_end in /proc/PID/stat, counted from the state (source: proc(5))."""


def is_alive(pid: int) -> bool:
    """True if a process has not ended; an unreaped one has."""
    return _state(pid) not in ("", "Z", "X")


def is_stopped(pid: int) -> bool:
    """True if a process was stopped by a signal, and not by a debugger."""
    return _state(pid) == "T"


def environment(pid: int) -> list[bytes]:
    """Read the variables of a process, each as NAME=VALUE.

    While a process begins a new program, the kernel has its memory but not yet its environment, and shows none;
    that moment is waited for.

    Raises:
        OSError: the process has ended, or belongs to another user.
    """
    path, end = Path(f"/proc/{pid}/environ"), time.monotonic() + _EXEC_S
    while not (content := path.read_bytes()) and _has_variables(pid) and time.monotonic() < end:
        time.sleep(0.001)
    return content.split(b"\0")


def _has_variables(pid: int) -> bool:
    """True unless a process has ended, is a thread of the kernel, or has an environment of length zero."""
    fields = _stat(pid)
    if len(fields) <= _ENVIRONMENT_END or fields[_MEMORY] == "0":
        return False
    return fields[_ENVIRONMENT_END] == "0" or fields[_ENVIRONMENT_START] != fields[_ENVIRONMENT_END]


def _state(pid: int) -> str:
    """Return the letter of a process's state; empty if it does not exist."""
    return next(iter(_stat(pid)), "")


def _stat(pid: int) -> list[str]:
    """Return the fields of a process from its state on; empty if it does not exist."""
    with suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text("ascii", "replace")
        return stat.rpartition(")")[2].split()
    return []


def is_tracker(pid: int) -> bool:
    """True if a process is Python's resource tracker, which exits by itself when it is not needed."""
    with suppress(OSError):
        return _TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def oom_kills() -> int:
    """Count the processes that the kernel's out-of-memory killer has ended since the machine started."""
    return _number("/proc/vmstat", r"^oom_kill (\d+)$") or 0


def available_gib() -> float | None:
    """Return the host memory available to programs, GiB; None if the kernel does not report it."""
    kib = _number("/proc/meminfo", r"^MemAvailable: +(\d+) kB$")
    return None if kib is None else kib / 2**20


def _number(path: str, pattern: str) -> int | None:
    with suppress(OSError):
        match = re.search(pattern, Path(path).read_text("ascii", "replace"), re.MULTILINE)
        return int(match[1]) if match else None
    return None
