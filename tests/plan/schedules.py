"""The schedules and sizes that tests of the pipeline go through."""

from __future__ import annotations

from nanoscale.config.layout import ONE_STAGE, V_SHAPED, takes

SCHEDULES = [
    ("gpipe", 1),
    ("1f1b", 1),
    *((name, v) for name in ("interleaved-1f1b", "looped-bfs", "zero-bubble") for v in (1, 2, 3)),
    ("zbv", 2),
    ("dualpipev", 2),
]
"""each with its stages a rank"""

assert {name for name, _ in SCHEDULES} >= ONE_STAGE | V_SHAPED


def batches(schedule: str, pp: int, rounds: int = 3) -> list[int]:
    """Return the numbers of micro batches that a schedule supports, up to `rounds` times pp and a few more."""
    return [m for m in range(1, rounds * pp + 2) if takes(schedule, pp, m)]
