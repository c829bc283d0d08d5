"""Facts about processes and memory that Linux shows in /proc."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

_TRACKER = b"multiprocessing.resource_tracker"


def is_alive(pid: int) -> bool:
    """True if a process has not ended; an unreaped one has."""
    return _state(pid) not in ("", "Z", "X")


def is_stopped(pid: int) -> bool:
    """True if a process was stopped by a signal, and not by a debugger."""
    return _state(pid) == "T"


def _state(pid: int) -> str:
    """Return the letter of a process's state; empty if it does not exist."""
    with suppress(OSError, IndexError):
        stat = Path(f"/proc/{pid}/stat").read_text("ascii", "replace")
        return stat.rpartition(")")[2].split()[0]
    return ""


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
