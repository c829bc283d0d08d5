"""Tensors between stages that torch keeps beside the activations in flight, however few of those there are.

`PipelineStage` makes a buffer for the input of every micro batch of a step, and one for the gradient of its
result, when the first step begins, and keeps them (torch 2.11 to 2.13, `_setup_forward_recv_info` and
`_create_grad_recv_info`). A split backward pass also leaves the gradient of each input on its buffer until the
next step begins; a full one takes it off. Each tensor is `[micro_batch, seq, hidden]` of the rank's share.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from nanoscale.config.stages import SPLIT_BACKWARD, stages_of
from nanoscale.plan.pipeline.orders import order


@dataclass(frozen=True, slots=True)
class Boundary:
    """Tensors that a stage keeps, by what they are of."""

    inputs: int
    """of activations; an activation in flight has its stage's input here, not beside it"""
    output_gradients: int
    input_gradients: int
    """at the end of a step; as many are there at any time as micro batches have gone backward"""

    @property
    def tensors(self) -> int:
        return self.inputs + self.output_gradients + self.input_gradients


@lru_cache(maxsize=1024)
def boundaries(
    schedule: str, pp: int, virtual_stages: int, micro_batches: int
) -> tuple[tuple[Boundary, ...], ...]:
    """By rank and by the rank's stages, from the model's first to its last."""
    if pp == 1:
        return ((Boundary(0, 0, 0),),)
    last = pp * virtual_stages - 1
    split = _split_passes(schedule, pp, virtual_stages, micro_batches)
    return tuple(
        tuple(
            Boundary(
                inputs=micro_batches if stage > 0 else 0,
                output_gradients=micro_batches if stage < last else 0,
                input_gradients=split[stage] if stage > 0 else 0,
            )
            for stage in stages_of(schedule, pp, virtual_stages, rank)
        )
        for rank in range(pp)
    )


def _split_passes(schedule: str, pp: int, virtual_stages: int, micro_batches: int) -> Counter[int]:
    """How many backward passes of each stage are split; all of them but with dualpipev."""
    if schedule not in SPLIT_BACKWARD:
        return Counter()
    if schedule != "dualpipev":
        return Counter(dict.fromkeys(range(pp * virtual_stages), micro_batches))
    # Only the ones at its two ends, however many micro batches there are between.
    few = order(schedule, pp, virtual_stages, 2 * pp)
    return Counter(action.stage for actions in few for action in actions if action.kind == "I")
