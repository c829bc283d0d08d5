"""What a launch would come to: whether it fits, how fast it is, how long it takes and what it costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nanoscale.config.derive import derive
from nanoscale.config.schema import Config
from nanoscale.plan import pipeline
from nanoscale.plan.hardware import Hardware, hardware_of
from nanoscale.plan.memory import RankMemory, rank_memory
from nanoscale.plan.part import GIB
from nanoscale.plan.pipeline import Costs, Timeline
from nanoscale.plan.timing import StageCost, StepTime, Training, stage_costs, step_time, training

SPREAD = 0.04
"""standard deviation of the memory in use around what is predicted, as a share of it"""
ENOUGH = 0.5
"""the least probability with which a layout is said to fit"""


@dataclass(frozen=True, slots=True)
class Prediction:
    """A configuration on its hardware."""

    config: Config
    hardware: Hardware
    memory: tuple[RankMemory, ...]
    """of every pipeline rank"""
    time: StepTime
    timeline: Timeline | None
    """of the pipeline's step, if there is one and it was simulated"""

    @property
    def worst(self) -> RankMemory:
        """The rank that uses most."""
        return max(self.memory, key=lambda rank: rank.total)

    @property
    def capacity(self) -> int:
        """Bytes of a device."""
        return int(self.hardware.memory_gib * GIB)

    @property
    def fits_probability(self) -> float:
        return fits_probability(self.worst.total, self.capacity)

    @property
    def fits(self) -> bool:
        return self.fits_probability >= ENOUGH

    @property
    def training(self) -> Training:
        return training(self.config, self.hardware, self.time)


def predict(config: Config) -> Prediction:
    """Predict a configuration that `rules.check` has resolved; a pipeline's schedule is simulated.

    Raises:
        UserError: the hardware is unknown or cannot compute what is asked.
    """
    hardware = hardware_of(config)
    layout = config.parallel
    timeline = simulated(config, stage_costs(config, hardware)) if layout.pp > 1 else None
    in_flight = timeline.held if timeline is not None else None
    return Prediction(
        config,
        hardware,
        tuple(_memory(config, hardware, in_flight)),
        step_time(config, hardware, timeline.makespan if timeline is not None else None),
        timeline,
    )


def estimate(config: Config, hardware: Hardware) -> Prediction:
    """The same in closed form, for a search through thousands of layouts."""
    layout = config.parallel
    in_flight = None
    if layout.pp > 1:
        assert isinstance(layout.virtual_stages, int)
        in_flight = pipeline.in_flight(
            layout.schedule, layout.pp, layout.virtual_stages, derive(config).accumulation
        )
    memory = tuple(_memory(config, hardware, in_flight))
    return Prediction(config, hardware, memory, step_time(config, hardware), None)


def simulated(config: Config, stages: Sequence[StageCost]) -> Timeline:
    """A step of the pipeline, action by action."""
    layout = config.parallel
    assert isinstance(layout.virtual_stages, int)
    schedule, count = layout.schedule, derive(config).accumulation
    actions = pipeline.order(schedule, layout.pp, layout.virtual_stages, count)
    return pipeline.simulate(actions, pipeline.first_stage_undivided(costs(schedule, stages)))


def costs(schedule: str, stages: Sequence[StageCost]) -> Costs:
    """What the stages of a schedule cost, as the simulation wants it."""
    return Costs(
        [stage.forward for stage in stages],
        [stage.backward - stage.weights for stage in stages],
        [stage.weights for stage in stages],
        [stage.send for stage in stages[:-1]],
        pipeline.transfers_overlap(schedule),
    )


def fits_probability(needed: int, capacity: int) -> float:
    """That a device of `capacity` bytes is enough where `needed` are predicted; the error is normal."""
    return 0.5 * math.erfc((needed - capacity) / (SPREAD * needed) / math.sqrt(2))


def _memory(
    config: Config, hardware: Hardware, in_flight: Sequence[Sequence[int]] | None
) -> list[RankMemory]:
    context = int(hardware.context_gib * GIB) if config.launcher.device == "cuda" else 0
    return rank_memory(config, in_flight, context_bytes=context)
