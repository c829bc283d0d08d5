"""This host: its part of an attempt, and what its kernel says of its memory."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

from nanoscale.processes.messages import Message


@dataclass(frozen=True)
class Host:
    """One host's part of an attempt, as the launcher orders it."""

    name: str
    node_rank: int
    nodes: int
    ranks: tuple[int, ...]
    """global ranks, by local rank"""
    world_size: int
    master_addr: str
    master_port: int
    attempt: int

    @classmethod
    def of(cls, order: Message) -> Host:
        values = {field.name: order[field.name] for field in fields(cls)}
        return cls(**{**values, "ranks": tuple(order["ranks"])})


def oom_kills() -> int:
    """Processes that the kernel's out-of-memory killer has ended since the machine started."""
    with suppress(OSError):
        found = re.search(
            r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text("ascii", "replace"), re.MULTILINE
        )
        if found:
            return int(found[1])
    return 0


def available_gib() -> float | None:
    """Host memory that programs can still have, GiB; None where the kernel does not say."""
    with suppress(OSError):
        found = re.search(
            r"^MemAvailable: +(\d+) kB$", Path("/proc/meminfo").read_text("ascii", "replace"), re.M
        )
        if found:
            return int(found[1]) / 2**20
    return None


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal; one that a debugger holds was not."""
    with suppress(OSError, IndexError):
        stat = Path(f"/proc/{pid}/stat").read_text("ascii", "replace")
        return stat.rpartition(")")[2].split()[0] == "T"
    return False
