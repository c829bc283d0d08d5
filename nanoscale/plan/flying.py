"""The micro batches that are under way on a pipeline rank: what they keep, and what the highest needs beyond
that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nanoscale.config.stages import rank_of
from nanoscale.plan.activations import stage_activations
from nanoscale.plan.pipeline.boundaries import NONE, Boundary, boundaries
from nanoscale.plan.setting import Setting
from nanoscale.plan.shards import Stage


IN_FLIGHT = Boundary(0, 0, 0, 0, False)
"""a stage whose outputs are kept until their gradients arrive"""


@dataclass(frozen=True, slots=True)
class Flying:
    """Bytes of all micro batches under way on a rank."""

    activations: int
    extra: int
    """of the block whose backward pass is highest"""
    last: int
    """of the last block or group of one micro batch"""
    ends: int
    """of one micro batch, what is kept outside of the blocks and freed before the backward pass comes to them"""
    logits: int
    """their log-softmax, kept of every micro batch of the last stage"""
    loss: int
    """more than that, where the backward pass begins with the loss"""
    stranded: int
    """the logits, which the loss frees: smaller than any of its own tensors, they leave a hole"""
    received: int
    """buffers of a pipeline's boundaries beyond the micro batches under way"""
    offloaded: int


def fly_all(setting: Setting, stages: Sequence[Stage], in_flight: Sequence[int]) -> Flying:
    """Add the micro batches of all stages of a rank up."""
    shape, run = setting.shape, setting.run
    activations = extra = last = gone = logits = loss = stranded = received = offloaded = 0
    boundary = shape.tokens // shape.shares * shape.hidden * run.compute
    for stage, flying, edge in zip(stages, in_flight, _edges(setting, stages), strict=True):
        blocks = stage_activations(stage.layers, shape, run, setting.config.parallel, setting.keep)
        held, freed = _ends(setting, stage)
        activations += flying * (blocks.kept + held + freed)
        offloaded += flying * blocks.host
        if blocks.extra > extra:
            extra, last = blocks.extra, blocks.last
        if stage.last:
            gone = freed
            number = shape.tokens * setting.vocabulary
            kept, first = _loss_bytes(setting)
            logits, loss = flying * number * kept, number * first
            stranded = number * setting.compute
        received += edge.tensors(flying) * boundary
    return Flying(activations, extra, last, gone, logits, loss, stranded, received, offloaded)


def _edges(setting: Setting, stages: Sequence[Stage]) -> Sequence[Boundary]:
    """DeepSpeed's pipelines have a buffer for each micro batch under way and no more."""
    layout = setting.config.parallel
    if setting.pp == 1 or setting.flat:
        return [NONE if stage.last else IN_FLIGHT for stage in stages]
    assert isinstance(layout.virtual_stages, int)
    ranks = boundaries(layout.schedule, setting.pp, layout.virtual_stages, setting.micro_batches)
    return ranks[rank_of(layout.schedule, setting.pp, stages[0].number)]


def _ends(setting: Setting, stage: Stage) -> tuple[int, int]:
    """Bytes that a micro batch keeps outside of the blocks: to the end of its backward pass, and until that
    comes to the blocks.

    The former are token ids, the latter what the last norm and the head have saved.
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


def _loss_bytes(setting: Setting) -> tuple[int, int]:
    """Bytes of a logit from the forward pass on, and more of them where the backward pass begins.

    The log-softmax, in fp32 or better; then the gradients of it and of the logits, and with the vocabulary
    divided one more (torch.distributed.tensor.parallel.loss).
    """
    if setting.loss_copies is not None:
        return setting.compute, setting.loss * setting.loss_copies
    return setting.loss, setting.loss * (3 if setting.vocabulary_parallel else 2)
