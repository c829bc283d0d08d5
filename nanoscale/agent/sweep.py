"""Ending what is left of a job on this host, where its agent can no longer see to it.

Ranks die with their agent by a thread of their own, which a rank that was stopped does not run; and an agent
that was stopped itself ends nothing.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from nanoscale.channel import MARK

_LIMIT_S = 5.0
_PAUSE_S = 0.02


def sweep(mark: str) -> list[int]:
    """SIGKILL every process that carries the mark, and the agent that leads their group.

    Returns:
        those that would not go.
    """
    deadline = time.monotonic() + _LIMIT_S
    while left := sorted(_found(mark)):
        if time.monotonic() > deadline:
            break
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_PAUSE_S)
    return left


def _found(mark: str) -> set[int]:
    """An agent has its mark by an order only, so the kernel shows it of the processes that it started."""
    marked = set(_marked(f"{MARK}={mark}".encode()))
    leaders = set()
    for pid in marked:
        with suppress(OSError):
            leaders.add(os.getpgid(pid))
    return {pid for pid in marked | leaders - {os.getpgid(0)} if _lives(pid)}


def _marked(variable: bytes) -> Iterator[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if variable in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)


def _lives(pid: int) -> bool:
    with suppress(OSError, IndexError):
        stat = Path(f"/proc/{pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] not in ("Z", "X")
    return False
