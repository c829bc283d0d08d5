"""The number of in-flight micro batches of a pipeline rank: it follows from the order alone, not from times.

A micro batch is held from its forward pass to the end of its full backward pass. If the backward pass is
split, torch keeps the whole graph of the stage until the gradients of weights are done (`stage_backward_input`
asks autograd to retain it), and in addition to it the gradients that have reached the products with weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from nanoscale.plan.pipeline.orders import Action, Kind, order


@dataclass(frozen=True, slots=True)
class Residents:
    """A rank at its peak, by its stages from the model's first to its last."""

    held: list[int]
    """Micro batches whose activations are held."""
    between: list[int]
    """Among these, those between the gradients of inputs and those of weights."""


def residents(actions: Sequence[Action], sizes: Sequence[float] | None = None) -> Residents:
    """Return the first of the peaks of a rank.

    `sizes` are the activations of one micro batch, by the rank's stages in the model's order; equal by
    default.
    """
    stages = sorted({action.stage for action in actions})
    place = {stage: index for index, stage in enumerate(stages)}
    size = sizes or [1.0] * len(stages)
    held, between = [0] * len(stages), [0] * len(stages)
    now, most = 0.0, -1.0
    peak = Residents([], [])
    for action in actions:
        index = place[action.stage]
        if action.kind == "F":
            held[index] += 1
            now += size[index]
            if now > most:
                most, peak = now, Residents(held.copy(), between.copy())
        elif action.kind == "I":
            between[index] += 1
        else:
            held[index] -= 1
            between[index] -= action.kind == "W"
            now -= size[index]
    return peak


@dataclass(frozen=True, slots=True)
class Moment:
    """A rank while it computes; counts are by its stages from the model's first to its last."""

    held: tuple[int, ...]
    """Micro batches whose activations are held."""
    between: tuple[int, ...]
    """Among these, those whose weights' gradients are still to come, without the pass itself."""
    forward: tuple[int, ...]
    """Micro batches that have gone forward in this step."""
    backward: tuple[int, ...]
    """Micro batches whose inputs' gradients are computed."""
    kind: Kind
    """The pass that is computed."""
    place: int
    """The index of its stage on the rank."""


@lru_cache(maxsize=1024)
def moments(
    schedule: str, pp: int, virtual_stages: int, micro_batches: int, rank: int
) -> tuple[Moment, ...]:
    """Return the moments of a rank's step that no other moment of the same pass dominates.

    After 2·pp micro batches a schedule repeats itself: more come in the middle of the step.
    """
    few = min(micro_batches, 2 * pp)
    return _highest(order(schedule, pp, virtual_stages, few)[rank], few, micro_batches - few)


def _highest(actions: Sequence[Action], few: int, more: int) -> tuple[Moment, ...]:
    """Return the moments that no other in the same pass dominates, by sums: a rank's stages are about equal."""
    stages = sorted({action.stage for action in actions})
    places = {stage: place for place, stage in enumerate(stages)}
    held = between = 0
    fronts: dict[tuple[Kind, int], list[tuple[int, int, int]]] = {}
    for number, action in enumerate(actions):
        held += action.kind == "F"
        between -= action.kind == "W"
        front = fronts.setdefault((action.kind, places[action.stage]), [])
        # If two hold the same, the later one counts: more has been sent by then.
        front[:] = [other for other in front if other[0] > held or other[1] > between]
        if not any(one >= held and two >= between for one, two, _ in front):
            front.append((held, between, number))
        between += action.kind == "I"
        held -= action.kind in ("B", "W")
    chosen = [number for front in fronts.values() for _, _, number in front]
    there = dict(_walk(actions, places, set(chosen), few, more))
    return tuple(there[number] for number in chosen)


def _walk(
    actions: Sequence[Action], places: dict[int, int], wanted: set[int], few: int, more: int
) -> Iterator[tuple[int, Moment]]:
    """Yield the moments of these numbers."""
    held, between, forward, backward = ([0] * len(places) for _ in range(4))

    def counts(done: list[int]) -> tuple[int, ...]:
        return tuple(number + more * (2 * number > few) for number in done)

    for number, action in enumerate(actions):
        place = places[action.stage]
        held[place] += action.kind == "F"
        forward[place] += action.kind == "F"
        between[place] -= action.kind == "W"
        if number in wanted:
            now = tuple(held), tuple(between), counts(forward), counts(backward)
            yield number, Moment(*now, action.kind, place)
        between[place] += action.kind == "I"
        backward[place] += action.kind in ("B", "I")
        held[place] -= action.kind in ("B", "W")
