"""All legal layouts of a job, the fastest that fit first, and why the first is first.

The fastest schedule is looked for last, among the shapes that are best with 1F1B: a schedule fills the bubble of a
shape, and what else a shape costs is the same with all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nanoscale.config.schema import Config
from nanoscale.plan.candidates import Room, micro_batches, recomputations, schedules, shapes
from nanoscale.plan.hardware import Hardware
from nanoscale.plan.predict import Prediction, estimate, predict

REFINED = 48
"""shapes of which other schedules are tried"""
SIMULATED = 12
"""layouts whose pipelines are simulated in the end"""


@dataclass(frozen=True, slots=True)
class Found:
    """What a search has found."""

    ranked: tuple[Prediction, ...]
    """those that fit, the fastest first"""
    nearest: Prediction | None
    """where none fits: the one that comes nearest to it"""
    considered: int

    @property
    def best(self) -> Prediction | None:
        return self.ranked[0] if self.ranked else None

    def front(self) -> list[Prediction]:
        """The Pareto front: each is the fastest with so little memory."""
        front: list[Prediction] = []
        for plan in sorted(self.ranked, key=lambda p: (p.worst.total, p.time.seconds)):
            if not front or plan.time.seconds < front[-1].time.seconds:
                front.append(plan)
        return front


def search(room: Room, hardware: Hardware) -> Found:
    """Look through all of them, in closed form; the pipelines of the best are simulated."""
    tried = _Tried(hardware)
    for shape in shapes(room):
        tried.add_all(room, shape)
    first = sorted(tried.fitting, key=_speed)
    for plan in _best_of_shapes(first):
        for scheduled in schedules(room, plan.config):
            tried.add_all(room, scheduled)
    ranked = sorted(tried.fitting, key=_speed)
    exact = [predict(plan.config) if plan.config.parallel.pp > 1 else plan for plan in ranked[:SIMULATED]]
    exact = sorted((plan for plan in exact if plan.fits), key=_speed)
    return Found((*exact, *ranked[SIMULATED:]), tried.nearest, tried.considered)


class _Tried:
    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self.fitting: list[Prediction] = []
        self.nearest: Prediction | None = None
        self.considered = 0

    def add_all(self, room: Room, shape: Config) -> None:
        """Of each way to compute again, micro batches from the smallest to the first that does not fit."""
        for recomputed in recomputations(room, shape):
            for config in micro_batches(room, recomputed):
                self.considered += 1
                plan = estimate(config, self._hardware)
                if plan.fits:
                    self.fitting.append(plan)
                    continue
                if self.nearest is None or plan.worst.total < self.nearest.worst.total:
                    self.nearest = plan
                break


def _best_of_shapes(ranked: list[Prediction]) -> Iterator[Prediction]:
    """The fastest layout of every shape, as far as it is worth to look further."""
    seen: set[tuple[int, ...]] = set()
    for plan in ranked:
        layout = plan.config.parallel
        shape = (layout.tp, layout.pp, layout.cp, plan.config.zero.stage, layout.dp_replicate)
        if layout.pp > 1 and shape not in seen:
            seen.add(shape)
            yield plan
        if len(seen) == REFINED:
            return


def _speed(plan: Prediction) -> float:
    return plan.time.seconds
