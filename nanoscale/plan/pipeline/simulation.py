"""The start and end of each action of a pipeline, from the order of actions and their costs.

A rank runs its actions in order. An action starts as soon as the rank is free and the action's input has
arrived. torch's runtime works in the same way: it launches actions in order and waits only for receives.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from nanoscale.config.layout import ONE_STAGE, SPLIT_BACKWARD
from nanoscale.plan.pipeline.orders import Action, Kind, Order, order
from nanoscale.plan.pipeline.residents import residents


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of one micro batch, by stage."""

    forward: Sequence[float]
    backward_input: Sequence[float]
    """Gradients of inputs, including recomputation. A full backward pass takes `backward_input` +
    `backward_weight`."""
    backward_weight: Sequence[float]
    transfer: Sequence[float]
    """The transfer from stage s to stage s + 1 on another rank, or of the gradient back."""
    overlap: bool = True
    """True if transfers overlap with computation. Otherwise a rank requests its input when it is free."""


def transfers_overlap(schedule: str) -> bool:
    """True if torch runs this schedule's transfers in parallel with the computation.

    Schedules with several stages a rank post a receive as soon as the sender has sent. gpipe and 1f1b request
    an input right before they need it, and wait.
    """
    return schedule not in ONE_STAGE


def first_stage_undivided(costs: Costs) -> Costs:
    """Return the costs if the first stage's backward pass is not split, as in torch.

    The first stage's inputs need no gradients: its action I computes nothing, and its action W the whole
    backward pass (`PipelineStage`, `is_first`).
    """
    first = costs.backward_input[0]
    return replace(
        costs,
        backward_input=[0.0, *costs.backward_input[1:]],
        backward_weight=[costs.backward_weight[0] + first, *costs.backward_weight[1:]],
    )


class Span(NamedTuple):
    """An action in time, in seconds from the beginning of the step."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """One optimizer step of a pipeline, without the work before and after it."""

    ranks: list[list[Span]]
    held: list[list[int]]
    """`Residents.held` at each rank's peak, by rank and by the rank's stages in the model's order."""
    awaiting_weights: list[list[int]]
    """`Residents.awaiting_weights` at each rank's peak."""

    @cached_property
    def makespan(self) -> float:
        """Seconds until the last rank is done."""
        return max(spans[-1].end for spans in self.ranks)

    @cached_property
    def busy(self) -> list[float]:
        """Seconds that each rank computes."""
        return [sum(span.end - span.start for span in spans) for spans in self.ranks]

    @property
    def utilization(self) -> float:
        """The share of all ranks' time in which they compute; 1 if all costs are 0."""
        return sum(self.busy) / (len(self.ranks) * self.makespan) if self.makespan else 1.0

    @property
    def bubble_fraction(self) -> float:
        """The share of all ranks' time in which they wait."""
        return 1.0 - self.utilization


def simulate(ranks: Order, costs: Costs) -> Timeline:
    """Simulate one step in time linear in the number of actions. Raise an AssertionError for a deadlock."""
    run = _Run(ranks, costs)
    awake = deque(range(len(ranks)))
    while awake:
        awake += run.advance(awake.popleft())
    assert not (stuck := run.stuck()), f"deadlock: {stuck}"
    held = [residents(actions) for actions in ranks]
    return Timeline(
        run.spans, [peak.held for peak in held], [peak.awaiting_weights for peak in held]
    )


def simulate_schedule(
    schedule: str, pp: int, virtual_stages: int, micro_batches: int, costs: Costs
) -> Timeline:
    """Simulate a step as torch runs it: with its order, its way of waiting, and its first stage undivided.

    `costs` are the stages' costs; their `overlap` is ignored.
    """
    costs = replace(costs, overlap=transfers_overlap(schedule))
    if pp > 1 and schedule in SPLIT_BACKWARD:
        costs = first_stage_undivided(costs)
    return simulate(order(schedule, pp, virtual_stages, micro_batches), costs)


_MISSING = -1.0


class _Pass(NamedTuple):
    """All actions of one kind in one stage."""

    inputs: list[float]
    """The time when the input of each micro batch was made."""
    travel: float
    """Seconds of an input's transfer from another rank."""
    seconds: float
    outputs: Sequence[list[float]]
    """The inputs that it makes; first the inputs of `reader`."""
    reader: int | None
    """Another rank that reads its outputs."""


class _Run:
    """The progress of each rank, and the times of all inputs made so far."""

    def __init__(self, ranks: Order, costs: Costs) -> None:
        self._ranks, self._overlap = ranks, costs.overlap
        batches = 1 + max(action.micro_batch for own in ranks for action in own)
        self._passes = _passes(ranks, costs, batches)
        self._at = [0] * len(ranks)
        self._waits_for: list[list[float] | None] = [None] * len(ranks)
        """The inputs from which each rank needs the next."""
        self.spans: list[list[Span]] = [[] for _ in ranks]

    def stuck(self) -> str:
        """Return the ranks that have actions left; empty if none has."""
        waiting = zip(self._at, self._ranks, strict=True)
        return ", ".join(
            f"rank {rank} waits for the input of {own[at]}"
            for rank, (at, own) in enumerate(waiting)
            if at < len(own)
        )

    def advance(self, rank: int) -> list[int]:
        """Run the actions that a rank can run now, and return the ranks that waited for it."""
        own, spans, passes = self._ranks[rank], self.spans[rank], self._passes
        clock = spans[-1].end if spans else 0.0
        # Results of a joined action are announced with the next action, which may still be waiting.
        joined = own[self._at[rank] - 1] if spans and spans[-1].action.joined else None
        woken: list[int] = []
        self._waits_for[rank] = None
        for at in range(self._at[rank], len(own)):
            action = own[at]
            kind, stage, batch, joins = action
            step = passes[kind][stage]
            inputs, travel, seconds, _, _ = step
            made = inputs[batch]
            if made == _MISSING:
                self._waits_for[rank] = inputs
                break
            start = max(clock, made + travel) if self._overlap else max(clock, made) + travel
            clock = start + seconds
            spans.append(Span(action, start, clock))
            if joins:
                joined = action
                continue
            if joined is not None:
                self._announce(passes[joined.kind][joined.stage], joined.micro_batch, clock, woken)
                joined = None
            self._announce(step, batch, clock, woken)
        self._at[rank] = len(spans)
        return woken

    def _announce(self, step: _Pass, batch: int, end: float, woken: list[int]) -> None:
        """Publish an action's results; ranks that waited for them can continue."""
        _, _, _, outputs, reader = step
        for made in outputs:
            made[batch] = end
        if reader is not None and self._waits_for[reader] is outputs[0]:
            woken.append(reader)


def _passes(ranks: Order, costs: Costs, batches: int) -> dict[Kind, list[_Pass]]:
    """Return the passes by kind and stage, wired: the outputs of one are the inputs of another."""
    rank_of = {action.stage: rank for rank, own in enumerate(ranks) for action in own}
    last = len(costs.forward) - 1

    def missing() -> list[list[float]]:
        return [[_MISSING] * batches for _ in range(last + 1)]

    forward, backward, weights = missing(), missing(), missing()
    forward[0] = [0.0] * batches
    made: dict[Kind, list[_Pass]] = {"F": [], "B": [], "I": [], "W": []}
    for stage in range(last + 1):
        peers = [rank_of[other] if 0 <= other <= last else None for other in (stage - 1, stage + 1)]
        before, after = (None if other == rank_of[stage] else other for other in peers)
        down = costs.transfer[stage - 1] if before is not None else 0.0
        up = costs.transfer[stage] if after is not None else 0.0
        onward = [forward[stage + 1] if stage < last else backward[last]]
        back = [backward[stage - 1]] if stage else []
        inputs, products = costs.backward_input[stage], costs.backward_weight[stage]
        made["F"].append(_Pass(forward[stage], down, costs.forward[stage], onward, after))
        made["B"].append(_Pass(backward[stage], up, inputs + products, back, before))
        made["I"].append(_Pass(backward[stage], up, inputs, [*back, weights[stage]], before))
        made["W"].append(_Pass(weights[stage], 0.0, products, [], None))
    return made
