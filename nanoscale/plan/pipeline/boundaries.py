"""Tensors between stages that torch keeps in addition to the in-flight activations, however few of those there
are.

`PipelineStage` makes a buffer for the input of every micro batch of a step, and one for the gradient of its
result, when the first step begins, and keeps them (torch 2.11 to 2.13, `_setup_forward_recv_info` and
`_create_grad_recv_info`). Schedules of several stages a rank, and GPipe in its backward passes, wait for their
sends only at the end of the step (`send_ops` of `_PipelineScheduleRuntime`), and sent tensors are held until
then. A split backward pass also leaves the gradient of each input on its buffer until the next step begins.
Stages of one rank hand each other's tensors over, which are then the buffers. Each tensor is `[micro_batch,
seq, hidden]` of the rank's share.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from nanoscale.config.layout import ONE_STAGE, rank_of, stages_of


@dataclass(frozen=True, slots=True)
class KeptBoundary:
    """Tensors that a stage keeps at the end of a step, by kind."""

    inputs: int
    """Activations; an in-flight activation has its stage's input here, not in addition to it."""
    output_gradients: int
    outputs: int
    """At any time, one per micro batch that has gone forward."""
    input_gradients: int
    """At any time, one per micro batch that has gone backward."""
    hands_over: bool
    """True if the output of an in-flight micro batch is the next stage's input, on the same rank."""

    def tensors(self, flying: int, forward: int, backward: int) -> int:
        """Return the tensors in addition to the inputs of in-flight micro batches, after so many have gone
        forward and backward."""
        outputs = 0 if self.hands_over else max(min(self.outputs, forward), flying)
        gradients = min(self.input_gradients, backward)
        return self.inputs - min(self.inputs, flying) + self.output_gradients + outputs + gradients


@lru_cache(maxsize=1024)
def boundaries(
    schedule: str, pp: int, virtual_stages: int, micro_batches: int
) -> tuple[tuple[KeptBoundary, ...], ...]:
    """Return the boundaries by rank and by the rank's stages, from the model's first to its last."""
    if pp == 1:
        return ((NONE,),)
    last = pp * virtual_stages - 1

    def boundary(stage: int, rank: int) -> KeptBoundary:
        into = stage > 0
        onward = stage < last
        receives = into and rank_of(schedule, pp, stage - 1) != rank
        sends = onward and rank_of(schedule, pp, stage + 1) != rank
        several = schedule not in ONE_STAGE
        return KeptBoundary(
            inputs=micro_batches * into,
            output_gradients=micro_batches * onward,
            outputs=micro_batches * (sends and several),
            input_gradients=micro_batches * (receives and schedule != "1f1b"),
            hands_over=not sends,
        )

    return tuple(
        tuple(boundary(stage, rank) for stage in stages_of(schedule, pp, virtual_stages, rank))
        for rank in range(pp)
    )


NONE = KeptBoundary(0, 0, 0, 0, True)
"""The boundary without a pipeline."""
