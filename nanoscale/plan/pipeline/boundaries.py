"""Tensors between stages that torch keeps for all micro batches of a step, in addition to the in-flight
activations.

When the first step begins, `PipelineStage` allocates buffers for every micro batch's input and for the gradient
of its result, and keeps the buffers (torch 2.11 to 2.13, `_setup_forward_recv_info` and
`_create_grad_recv_info`). Schedules with several stages a rank wait for their sends only at the end of the
step, and so does GPipe in its backward passes (`send_ops` of `_PipelineScheduleRuntime`). Until then torch
keeps the sent tensors. A split backward pass keeps the gradient of each input until the next step begins.
Between two stages of one rank, the output of the first stage is the buffer of the second. Each tensor is
`[micro_batch, seq, hidden]`, divided by cp and, with sequence parallelism, by tp.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from nanoscale.config.layout import ONE_STAGE, rank_of, stages_of


@dataclass(frozen=True, slots=True)
class KeptBoundary:
    """Tensors that a stage keeps at the end of a step, by kind."""

    inputs: int
    """Inputs of all micro batches. The inputs of in-flight micro batches are among them."""
    output_gradients: int
    outputs: int
    """During a step, one for each micro batch that has gone forward."""
    input_gradients: int
    """During a step, one for each micro batch that has gone backward."""
    hands_over: bool
    """True if the output of an in-flight micro batch is the next stage's input, on the same rank."""

    def tensors(self, flying: int, forward: int, backward: int) -> int:
        """Return the number of tensors, without the inputs of the `flying` in-flight micro batches.

        Args:
            forward: micro batches that have gone forward.
            backward: micro batches that have gone backward.
        """
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
        has_input, has_output = stage > 0, stage < last
        receives = has_input and rank_of(schedule, pp, stage - 1) != rank
        sends = has_output and rank_of(schedule, pp, stage + 1) != rank
        several = schedule not in ONE_STAGE
        return KeptBoundary(
            inputs=micro_batches * has_input,
            output_gradients=micro_batches * has_output,
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
