"""The schedules and sizes that tests of the pipeline go through."""

from __future__ import annotations

from nanoscale.config.layout import ONE_STAGE, V_SHAPED, takes
from nanoscale.plan.pipeline.simulation import Costs, Timeline

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


def even_costs(
    stages: int,
    forward: float = 1.0,
    backward_input: float = 1.0,
    backward_weight: float = 1.0,
    transfer: float = 0.0,
    overlap: bool = True,
) -> Costs:
    """Return equal costs of all stages."""
    return Costs(
        [forward] * stages,
        [backward_input] * stages,
        [backward_weight] * stages,
        [transfer] * (stages - 1),
        overlap,
    )


def idle(timeline: Timeline) -> list[float]:
    """Return the seconds that each rank waits, including the start and the end of the step."""
    return [timeline.makespan - busy for busy in timeline.busy]
