"""Ending processes of a job on this host that its agent can no longer end.

Ranks exit with their agent by a thread of their own, which does not run in a stopped rank; and an agent that
was stopped itself ends nothing.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

from nanoscale.processes import orphans, scratch

_LIMIT_S = 5.0
_PAUSE_S = 0.02


def sweep(mark: str) -> list[int]:
    """SIGKILL every process of the job, and the agent that leads their group; remove their files.

    Returns:
        the processes that did not exit.
    """
    deadline = time.monotonic() + _LIMIT_S
    while left := sorted(_find(mark)):
        if time.monotonic() > deadline:
            break
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_PAUSE_S)
    scratch.remove_stale()
    return left


def _find(mark: str) -> set[int]:
    """Find processes by their mark: an agent has it only from an order, so it is in the environment of its
    children."""
    processes = set(orphans.marked(mark))
    leaders = set()
    for pid in processes:
        with suppress(OSError):
            leaders.add(os.getpgid(pid))
    return processes | {pid for pid in leaders - {os.getpgid(0)} if orphans.lives(pid)}
