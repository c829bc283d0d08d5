"""In-flight activations: the memory of the micro batches between their passes on a pipeline rank, and its
peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nanoscale.config.layout import SPLIT_BACKWARD, rank_of
from nanoscale.plan.memory.activations import StageActivations, stage_activations
from nanoscale.plan.memory.loss import loss_memory
from nanoscale.plan.memory.setting import MemorySetting
from nanoscale.plan.memory.shards import Stage
from nanoscale.plan.pipeline.boundaries import NONE, KeptBoundary, boundaries
from nanoscale.plan.pipeline.residents import Moment, moments

IN_FLIGHT = KeptBoundary(0, 0, 0, 0, False)
"""A stage whose outputs are kept until their gradients arrive."""


@dataclass(frozen=True, slots=True)
class InFlightActivations:
    """Bytes of all in-flight micro batches of a rank."""

    held: tuple[int, ...]
    """The number of in-flight micro batches of each stage."""
    activations: int
    extra: int
    """The addition of the block at the peak of its backward pass."""
    last: int
    """Bytes of the last block or group of one micro batch."""
    ends: int
    """Among the activations: those of one micro batch outside of the blocks that are freed before the backward
    pass reaches the blocks."""
    loss_kept: int
    """Kept by the loss, for every micro batch of the last stage."""
    gone: int
    """Among these: freed before the backward pass reaches the blocks."""
    loss: int
    """Beyond that, at the peak of the loss."""
    fragmented: int
    """See `LossMemory`."""
    received: int
    """Buffers of a pipeline's boundaries beyond the in-flight micro batches."""
    offloaded: int


def fly_all(
    setting: MemorySetting, stages: Sequence[Stage], in_flight: Sequence[int]
) -> list[InFlightActivations]:
    """Return the moments of a step at which a rank's memory may peak, summed over its stages.

    `in_flight` is the number of in-flight micro batches of each stage at its peak; with split backward passes
    the schedule itself gives the moments.
    """
    layout, rank = setting.config.parallel, _rank(setting, stages)
    edges = _edges(setting, stages)
    keeps = [_kept(setting, *pair) for pair in zip(stages, edges, strict=True)]
    if setting.pp == 1 or setting.flat or layout.schedule not in SPLIT_BACKWARD:
        return [_fly(setting, keeps, in_flight, None)]
    found = moments(layout.schedule, setting.pp, layout.virtual_stages, setting.micro_batches, rank)
    return [_fly(setting, keeps, moment.held, moment) for moment in found]


@dataclass(frozen=True, slots=True)
class _Kept:
    """Bytes of a stage that one micro batch keeps at any moment."""

    stage: Stage
    edge: KeptBoundary
    blocks: StageActivations
    waits: int
    held: int
    ends: int


def _kept(setting: MemorySetting, stage: Stage, edge: KeptBoundary) -> _Kept:
    layout = setting.config.parallel
    blocks = stage_activations(stage.layers, setting.shape, setting.run, layout, setting.keep)
    return _Kept(stage, edge, blocks, _waits(setting, stage, blocks), *_ends(setting, stage))


def _fly(
    setting: MemorySetting, keeps: Sequence[_Kept], in_flight: Sequence[int], moment: Moment | None
) -> InFlightActivations:
    """Return the in-flight activations at a moment, which is the pass that is computed; None: any full
    backward pass."""
    shape, run = setting.shape, setting.run
    activations = extra = last = freed = kept = gone = loss = fragmented = received = offloaded = 0
    boundary = shape.tokens // shape.shares * shape.hidden * run.compute
    of_loss = loss_memory(setting)
    for place, (kept_here, flying) in enumerate(zip(keeps, in_flight, strict=True)):
        stage, edge, blocks = kept_here.stage, kept_here.edge, kept_here.blocks
        waits, held, ends = kept_here.waits, kept_here.held, kept_here.ends
        waiting = moment.between[place] if moment else 0
        activations += flying * (blocks.kept + held + ends) + waiting * waits
        offloaded += flying * blocks.host
        # torch does not split the first stage's backward pass: its pass for weights is all of it.
        whole = moment is None or moment.kind == "B" or (moment.kind == "W" and stage.first)
        if moment is None or moment.place == place:
            highest = blocks.extra
            if moment and not whole:
                highest = {
                    "F": 0,
                    "I": 0 if stage.first else blocks.for_inputs + waits - blocks.between,
                    "W": blocks.for_weights + waits,
                }[moment.kind]
            if highest > extra:
                extra, last = highest, blocks.last
        if stage.last:
            kept = (flying - waiting) * of_loss.kept
            if moment is None or moment.place == place:
                loss = of_loss.more if whole or (moment and moment.kind == "I") else 0
                # A pass for inputs alone frees nothing before its end.
                freed, gone = (ends, of_loss.kept) if whole else (0, 0)
            fragmented = of_loss.fragmented
        # In other stages the peak holds while more micro batches are to come.
        forward = moment.forward[place] if moment else setting.micro_batches
        backward = moment.backward[place] if moment else setting.micro_batches - flying
        received += edge.tensors(flying, forward, backward) * boundary
    return InFlightActivations(
        tuple(in_flight),
        activations,
        extra,
        last,
        freed,
        kept,
        gone,
        loss,
        fragmented,
        received,
        offloaded,
    )


def _waits(setting: MemorySetting, stage: Stage, blocks: StageActivations) -> int:
    """Return the bytes of a micro batch's gradients from the pass for inputs to the pass for weights.

    The head's norm keeps its own, and the head's product what it saved; the gradient of the last block's
    result is in a buffer that is counted elsewhere.
    """
    shape, compute = setting.shape, setting.compute
    boundary = shape.tokens // shape.shares * shape.hidden * compute
    if stage.last and not shape.adapter_rank:
        kept = loss_memory(setting).kept + shape.tokens * shape.hidden * compute
        return blocks.between + kept + boundary
    return 0 if stage.first else blocks.between - boundary


def _rank(setting: MemorySetting, stages: Sequence[Stage]) -> int:
    return rank_of(setting.config.parallel.schedule, setting.pp, stages[0].number)


def _edges(setting: MemorySetting, stages: Sequence[Stage]) -> Sequence[KeptBoundary]:
    """Return the boundaries of a rank's stages; DeepSpeed has one buffer per in-flight micro batch."""
    layout = setting.config.parallel
    if setting.pp == 1 or setting.flat:
        return [NONE if stage.last else IN_FLIGHT for stage in stages]
    ranks = boundaries(layout.schedule, setting.pp, layout.virtual_stages, setting.micro_batches)
    return ranks[_rank(setting, stages)]


def _ends(setting: MemorySetting, stage: Stage) -> tuple[int, int]:
    """Return the bytes that a micro batch keeps outside of the blocks, in two sums.

    The first is kept to the end of its backward pass: token ids. The second is freed when that reaches the
    blocks: what the last norm saved, and the head's input or its gradient.
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
