"""The micro batches that are under way on a pipeline rank: what they keep, and what the highest needs beyond
that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nanoscale.plan.activations import stage_activations
from nanoscale.plan.setting import Setting
from nanoscale.plan.shards import Stage


@dataclass(frozen=True, slots=True)
class Flying:
    """Bytes of all micro batches under way on a rank."""

    activations: int
    extra: int
    """of the block whose backward pass is highest"""
    last: int
    """of the last block or group of one micro batch"""
    logits: int
    """kept of every micro batch of the last stage"""
    loss: int
    """more than that, where the backward pass begins with the loss"""
    stranded: int
    """the logits, where the loss frees them: smaller than any of its own tensors, they leave a hole"""
    received: int
    """buffers of a pipeline's boundaries beyond the micro batches under way"""
    offloaded: int


def fly_all(setting: Setting, stages: Sequence[Stage], in_flight: Sequence[int]) -> Flying:
    """Add the micro batches of all stages of a rank up."""
    shape, run = setting.shape, setting.run
    activations = extra = last = logits = loss = stranded = received = offloaded = 0
    boundary = shape.tokens // shape.shares * shape.hidden * run.compute
    for stage, flying in zip(stages, in_flight, strict=True):
        blocks = stage_activations(stage.layers, shape, run, setting.config.parallel, setting.keep)
        ends = _ends(setting, stage)
        activations += flying * (blocks.kept + ends)
        offloaded += flying * blocks.host
        if blocks.extra > extra:
            extra, last = blocks.extra, blocks.last
        if stage.last:
            number = shape.tokens * setting.vocabulary
            kept, first = _loss_bytes(setting)
            logits, loss = flying * number * kept, number * first
            stranded = 0 if setting.holds_logits else number * setting.compute
        waiting = setting.micro_batches - flying
        if not stage.first:
            received += waiting * boundary
        if not stage.last:
            received += setting.micro_batches * boundary
    # Only PyTorch's pipelines have a buffer ready for every micro batch.
    received *= setting.pp > 1 and not setting.flat
    return Flying(activations, extra, last, logits, loss, stranded, received, offloaded)


def _ends(setting: Setting, stage: Stage) -> int:
    """Bytes that a micro batch keeps outside of the blocks: of the embedding, the last norm and the head's
    input."""
    shape, run = setting.shape, setting.run
    part = shape.tokens // shape.shares
    tokens = 8 * shape.tokens * (2 if stage.last else 1) if stage.first or stage.last else 0
    if not stage.last:
        return tokens + part * shape.hidden * run.compute  # the output, until its gradient arrives
    normed = (shape.tokens if run.gathered else part) * shape.hidden * run.compute
    norm = part * (shape.hidden * run.stream + 4)
    if run.composed_norm and not shape.layernorm:
        norm = part * (shape.hidden * 2 * max(4, run.stream) + 4)
    return tokens + norm + normed


def _loss_bytes(setting: Setting) -> tuple[int, int]:
    """Bytes of a logit from the forward pass on, and more of them where the backward pass begins.

    The logits, and their log-softmax in fp32 or better; then the gradients of both, and with the vocabulary
    divided one more (torch.distributed.tensor.parallel.loss).
    """
    if setting.loss_copies is not None:
        return setting.compute, setting.loss * setting.loss_copies
    logits = setting.compute if setting.holds_logits else 0
    return logits + setting.loss, setting.loss * (3 if setting.vocabulary_parallel else 2)
