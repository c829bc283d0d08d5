"""The micro batches that are under way on a pipeline rank: what they keep, and what the highest needs beyond
that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nanoscale.config.stages import SPLIT_BACKWARD, rank_of
from nanoscale.plan.memory.activations import StageActivations, stage_activations
from nanoscale.plan.memory.loss import loss_memory
from nanoscale.plan.memory.setting import Setting
from nanoscale.plan.memory.shards import Stage
from nanoscale.plan.pipeline.boundaries import NONE, Boundary, boundaries
from nanoscale.plan.pipeline.residents import Moment, moments

IN_FLIGHT = Boundary(0, 0, 0, 0, False)
"""a stage whose outputs are kept until their gradients arrive"""


@dataclass(frozen=True, slots=True)
class Flying:
    """Bytes of all micro batches under way on a rank."""

    held: tuple[int, ...]
    """of each stage, how many those are"""
    activations: int
    extra: int
    """of the block whose backward pass is highest"""
    last: int
    """of the last block or group of one micro batch"""
    ends: int
    """of those, what one micro batch keeps outside of the blocks and frees before the backward pass is there"""
    loss_kept: int
    """by the loss, of every micro batch of the last stage"""
    gone: int
    """of those, what is freed before the backward pass comes to the blocks"""
    loss: int
    """more than that, where the loss holds most"""
    stranded: int
    """see `LossMemory`"""
    received: int
    """buffers of a pipeline's boundaries beyond the micro batches under way"""
    offloaded: int


def fly_all(setting: Setting, stages: Sequence[Stage], in_flight: Sequence[int]) -> list[Flying]:
    """The moments of a step at which a rank may hold most, all its stages added up.

    `in_flight`: micro batches under way in each stage at its highest; where passes are divided, the schedule
    itself says more.
    """
    layout, rank = setting.config.parallel, _rank(setting, stages)
    edges = _edges(setting, stages)
    keeps = [_kept(setting, *pair) for pair in zip(stages, edges, strict=True)]
    if setting.pp == 1 or setting.flat or layout.schedule not in SPLIT_BACKWARD:
        return [_fly(setting, keeps, in_flight, None)]
    assert isinstance(layout.virtual_stages, int)
    found = moments(layout.schedule, setting.pp, layout.virtual_stages, setting.micro_batches, rank)
    return [_fly(setting, keeps, moment.held, moment) for moment in found]


@dataclass(frozen=True, slots=True)
class _Kept:
    """Bytes of a stage that one micro batch keeps, whatever the moment."""

    stage: Stage
    edge: Boundary
    blocks: StageActivations
    waits: int
    held: int
    ends: int


def _kept(setting: Setting, stage: Stage, edge: Boundary) -> _Kept:
    layout = setting.config.parallel
    blocks = stage_activations(stage.layers, setting.shape, setting.run, layout, setting.keep)
    return _Kept(stage, edge, blocks, _waits(setting, stage, blocks), *_ends(setting, stage))


def _fly(
    setting: Setting, keeps: Sequence[_Kept], in_flight: Sequence[int], moment: Moment | None
) -> Flying:
    """`moment`: which pass is computed; None: any full backward pass."""
    shape, run = setting.shape, setting.run
    activations = extra = last = freed = kept = gone = loss = stranded = received = offloaded = 0
    boundary = shape.tokens // shape.shares * shape.hidden * run.compute
    of_loss = loss_memory(setting)
    for place, (kept_here, flying) in enumerate(zip(keeps, in_flight, strict=True)):
        stage, edge, blocks = kept_here.stage, kept_here.edge, kept_here.blocks
        waits, held, ends = kept_here.waits, kept_here.held, kept_here.ends
        waiting = moment.between[place] if moment else 0
        activations += flying * (blocks.kept + held + ends) + waiting * waits
        offloaded += flying * blocks.host
        # Of the first stage torch divides nothing: what is for its weights is all.
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
            stranded = of_loss.stranded
        # Elsewhere most is held as long as there are micro batches to come.
        forward = moment.forward[place] if moment else setting.micro_batches
        backward = moment.backward[place] if moment else setting.micro_batches - flying
        received += edge.tensors(flying, forward, backward) * boundary
    return Flying(
        tuple(in_flight),
        activations,
        extra,
        last,
        freed,
        kept,
        gone,
        loss,
        stranded,
        received,
        offloaded,
    )


def _waits(setting: Setting, stage: Stage, blocks: StageActivations) -> int:
    """Bytes of a micro batch's gradients from the pass for inputs to that for weights.

    The head's norm has its own, and its product what it has kept; the gradient of the last block's result is in
    a buffer elsewhere.
    """
    shape, compute = setting.shape, setting.compute
    boundary = shape.tokens // shape.shares * shape.hidden * compute
    if stage.last:
        kept = loss_memory(setting).kept + shape.tokens * shape.hidden * compute
        return blocks.between + kept + boundary
    return 0 if stage.first else blocks.between - boundary


def _rank(setting: Setting, stages: Sequence[Stage]) -> int:
    return rank_of(setting.config.parallel.schedule, setting.pp, stages[0].number)


def _edges(setting: Setting, stages: Sequence[Stage]) -> Sequence[Boundary]:
    """DeepSpeed's pipelines have a buffer for each micro batch under way and no more."""
    layout = setting.config.parallel
    if setting.pp == 1 or setting.flat:
        return [NONE if stage.last else IN_FLIGHT for stage in stages]
    assert isinstance(layout.virtual_stages, int)
    ranks = boundaries(layout.schedule, setting.pp, layout.virtual_stages, setting.micro_batches)
    return ranks[_rank(setting, stages)]


def _ends(setting: Setting, stage: Stage) -> tuple[int, int]:
    """Bytes that a micro batch keeps outside of the blocks: to the end of its backward pass, and until that
    comes to the blocks.

    The former are token ids, the latter what the last norm has saved and the head's input or its gradient.
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
