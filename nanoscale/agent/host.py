"""This host: its part of the launch, and what its kernel says of its memory."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nanoscale import worker
from nanoscale.runs.directory import RunDirectory, read_json


@dataclass(frozen=True)
class Host:
    """One host's part of launch.json."""

    name: str
    node_rank: int
    nodes: int
    ranks: tuple[int, ...]
    """global ranks, by local rank"""
    master_addr: str
    master_port: int
    attempt: int

    @classmethod
    def of(cls, run: RunDirectory) -> Host:
        """The part of the host that this process runs on."""
        launch = read_json(run.launch)
        name = worker.host_name()
        node_rank = [host["host"] for host in launch["hosts"]].index(name)
        return cls(
            name=name,
            node_rank=node_rank,
            nodes=len(launch["hosts"]),
            ranks=tuple(launch["hosts"][node_rank]["ranks"]),
            master_addr=launch["master_addr"],
            master_port=launch["master_port"],
            attempt=worker.attempt_number(),
        )


def oom_kills() -> int:
    """Processes that the kernel's out-of-memory killer has ended since the machine started."""
    with suppress(OSError):
        found = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
        if found:
            return int(found[1])
    return 0


def available_gib() -> float | None:
    """Host memory that programs can still have, GiB; None where the kernel does not say."""
    with suppress(OSError):
        found = re.search(r"^MemAvailable: +(\d+) kB$", Path("/proc/meminfo").read_text(), re.M)
        if found:
            return int(found[1]) / 2**20
    return None
