"""This host: its ranks in an attempt, and its memory according to the kernel."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

from nanoscale.processes.messages import Message


@dataclass(frozen=True)
class Host:
    """One host's ranks in an attempt, as the launcher orders them."""

    name: str
    node_rank: int
    nodes: int
    ranks: tuple[int, ...]
    """Global ranks, by local rank."""
    world_size: int
    master_addr: str
    master_port: int
    attempt: int

    @classmethod
    def of(cls, order: Message) -> Host:
        values = {field.name: order[field.name] for field in fields(cls)}
        return cls(**{**values, "ranks": tuple(order["ranks"])})


def oom_kills() -> int:
    """Count the processes that the kernel's out-of-memory killer has ended since the machine started."""
    with suppress(OSError):
        found = re.search(
            r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text("ascii", "replace"), re.MULTILINE
        )
        if found:
            return int(found[1])
    return 0


def available_gib() -> float | None:
    """Return the host memory available to programs, GiB; None if the kernel does not report it."""
    with suppress(OSError):
        found = re.search(
            r"^MemAvailable: +(\d+) kB$", Path("/proc/meminfo").read_text("ascii", "replace"), re.M
        )
        if found:
            return int(found[1]) / 2**20
    return None


def is_stopped(pid: int) -> bool:
    """True if a process was stopped by a signal, and not by a debugger."""
    with suppress(OSError, IndexError):
        stat = Path(f"/proc/{pid}/stat").read_text("ascii", "replace")
        return stat.rpartition(")")[2].split()[0] == "T"
    return False
