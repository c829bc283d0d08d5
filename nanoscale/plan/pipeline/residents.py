"""How many micro batches a pipeline rank holds activations of: a matter of its order alone, not of its times.

A micro batch is held from its forward pass to the end of its full backward pass. Where the backward pass is
split, torch keeps the whole graph of the stage until the gradients of weights are done
(`stage_backward_input` asks autograd to retain it), and beside it the gradients that have reached the
products with weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nanoscale.plan.pipeline.orders import Action


@dataclass(frozen=True, slots=True)
class Residents:
    """A rank at the moment when it holds most, by its stages from the model's first to its last."""

    held: list[int]
    """micro batches whose activations are there"""
    between: list[int]
    """of those, the ones whose weights' gradients are still to come, after those of the inputs"""


def residents(actions: Sequence[Action], sizes: Sequence[float] | None = None) -> Residents:
    """The first of the moments at which a rank holds most.

    `sizes`: what the activations of one micro batch take, by the rank's stages in the model's order; the same
    if left out.
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
