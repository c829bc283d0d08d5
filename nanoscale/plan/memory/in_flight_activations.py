"""The activations of a pipeline rank's in-flight micro batches, between their forward and backward passes."""

from collections.abc import Sequence
from dataclasses import dataclass

from nanoscale.config.layout import SPLIT_BACKWARD, rank_of
from nanoscale.plan.memory.activations import StageActivations, stage_activations
from nanoscale.plan.memory.loss import loss_memory
from nanoscale.plan.memory.phases import MemoryEvent
from nanoscale.plan.memory.setting import MemorySetting
from nanoscale.plan.memory.shards import Stage
from nanoscale.plan.pipeline.residents import Moment, at_peak, moments


@dataclass(frozen=True, slots=True)
class InFlightActivations:
    """Bytes of all in-flight micro batches of a rank, at one moment of a step."""

    micro_batches: tuple[int, ...]
    """The number of in-flight micro batches of each stage."""
    activations: int
    extra: int
    """The memory that a block's backward pass adds at its peak."""
    last: int
    """Bytes of one micro batch in the last block, or in the last recomputed group of blocks."""
    ends: int
    """The part of `activations` that one micro batch keeps for the last norm and the head: freed before the
    backward pass reaches the blocks."""
    loss_kept: int
    """Bytes that the loss keeps for every in-flight micro batch of the last stage."""
    loss_freed: int
    """The part of `loss_kept` that is freed before the backward pass reaches the blocks."""
    loss: int
    """The memory that the loss adds to `loss_kept` at its peak."""
    boundaries: int
    """Tensors between stages, without the inputs of in-flight micro batches."""
    offloaded: int

    def loss_event(self, pooled: int = 0, **during: int) -> MemoryEvent:
        """Return the event of the loss, with other parts that are added during the loss."""
        return MemoryEvent("loss", pooled=pooled, logits=self.loss_kept + self.loss, **during)


def activations_at_peaks(
    setting: MemorySetting, stages: Sequence[Stage], in_flight: Sequence[int]
) -> list[InFlightActivations]:
    """Return a rank's activations at the moments of a step at which its memory may peak.

    Args:
        in_flight: the number of in-flight micro batches of each stage at its peak. If the schedule splits
            backward passes, the order of actions gives the numbers instead.
    """
    layout = setting.config.parallel
    rank = rank_of(layout.schedule, setting.pp, stages[0].number)
    kept = [_kept(setting, stage) for stage in stages]
    if setting.pp == 1 or setting.flat or layout.schedule not in SPLIT_BACKWARD:
        return [_activations(setting, kept, in_flight, None)]
    peaks = moments(layout.schedule, setting.pp, layout.virtual_stages, setting.micro_batches, rank)
    return [_activations(setting, kept, moment.held, moment) for moment in peaks]


@dataclass(frozen=True, slots=True)
class _Kept:
    """Bytes that one micro batch keeps in a stage."""

    stage: Stage
    blocks: StageActivations
    waiting: int
    """Gradients from the pass for inputs to the pass for weights."""
    tokens: int
    ends: int
    """Bytes for the last norm and the head."""


def _kept(setting: MemorySetting, stage: Stage) -> _Kept:
    layout = setting.config.parallel
    blocks = stage_activations(stage.layers, setting.shape, setting.run, layout, stage.dense)
    waiting = _waiting(setting, stage, blocks)
    return _Kept(stage, blocks, waiting, *_outside_blocks(setting, stage))


def _activations(
    setting: MemorySetting, kept: Sequence[_Kept], in_flight: Sequence[int], moment: Moment | None
) -> InFlightActivations:
    """Return the in-flight activations during the pass of a moment; None: during any full backward pass."""
    shape, run = setting.shape, setting.run
    activations = extra = last = ends = 0
    loss_kept = loss_freed = loss = offloaded = 0
    boundary = shape.tokens // shape.shares * shape.hidden * run.compute
    between = (
        moment.boundaries
        if moment
        else _between_stages(setting, [one.stage for one in kept], in_flight)
    )
    loss_bytes = loss_memory(setting)
    for index, (one, flying) in enumerate(zip(kept, in_flight, strict=True)):
        stage, blocks = one.stage, one.blocks
        awaiting = moment.awaiting_weights[index] if moment else 0
        activations += flying * (blocks.kept + one.tokens + one.ends) + awaiting * one.waiting
        offloaded += flying * blocks.host
        computes = moment is None or moment.stage_index == index
        # torch does not split the first stage's backward pass: its pass for weights is the whole backward pass.
        full = moment is None or moment.kind == "B" or (moment.kind == "W" and stage.first)
        if computes:
            working = blocks.extra
            if moment and not full:
                for_inputs = blocks.for_inputs + one.waiting - blocks.waiting_gradients
                working = {
                    "F": 0,
                    "I": 0 if stage.first else for_inputs,
                    "W": blocks.for_weights + one.waiting,
                }[moment.kind]
            if working > extra:
                extra, last = working, blocks.last
        if stage.last:
            loss_kept = (flying - awaiting) * loss_bytes.kept
            if computes:
                loss = loss_bytes.extra if full or (moment and moment.kind == "I") else 0
                # A pass for inputs frees nothing before its end.
                ends, loss_freed = (one.ends, loss_bytes.kept) if full else (0, 0)
    return InFlightActivations(
        tuple(in_flight),
        activations,
        extra,
        last,
        ends,
        loss_kept,
        loss_freed,
        loss,
        between * boundary,
        offloaded,
    )


def _waiting(setting: MemorySetting, stage: Stage, blocks: StageActivations) -> int:
    """Return the bytes of a micro batch's gradients from the pass for inputs to the pass for weights.

    In the last stage these include the gradient of the last norm and the tensors that the head saved. Other
    stages receive the gradient of their last block's result in a buffer that `pipeline.boundaries` counts.
    """
    shape, compute = setting.shape, setting.compute
    boundary = shape.tokens // shape.shares * shape.hidden * compute
    if stage.last and not shape.adapter_rank:
        kept = loss_memory(setting).kept + shape.tokens * shape.hidden * compute
        return blocks.waiting_gradients + kept + boundary
    return 0 if stage.first else blocks.waiting_gradients - boundary


def _between_stages(
    setting: MemorySetting, stages: Sequence[Stage], in_flight: Sequence[int]
) -> int:
    """Return the tensors between stages; DeepSpeed has one buffer per in-flight micro batch."""
    layout = setting.config.parallel
    if setting.pp == 1 or setting.flat:
        return sum(
            flying for stage, flying in zip(stages, in_flight, strict=True) if not stage.last
        )
    ranks = at_peak(layout.schedule, setting.pp, layout.virtual_stages, setting.micro_batches)
    return ranks[rank_of(layout.schedule, setting.pp, stages[0].number)]


def _outside_blocks(setting: MemorySetting, stage: Stage) -> tuple[int, int]:
    """Return the bytes that a micro batch keeps outside of the blocks: of token ids, and for the last
    norm and head.

    Token ids are kept to the end of the backward pass. The tensors that the last norm saved and the
    head's input, or its gradient, are freed before the backward pass reaches the blocks.
    """
    shape, run = setting.shape, setting.run
    part = shape.tokens // shape.shares
    tokens = 8 * shape.tokens * (2 if stage.last else 1) if stage.first or stage.last else 0
    if not stage.last:
        return tokens, 0
    normed = (shape.tokens if run.gathered else part) * shape.hidden * run.compute
    norm = part * (shape.hidden * run.stream + 4)
    if run.composed_norm and not shape.layernorm:
        norm = part * (shape.hidden * 2 * max(4, run.stream) + 4)
    return tokens, norm + normed
