"""Memory of the head and the loss: ours holds gradients and a chunk of the logits (`models.head`), others all
logits."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from nanoscale.plan.memory.setting import MemorySetting

LOGITS_AT_ONCE = 2**28
"""The same number as in `models.head`; a test compares the two."""


@dataclass(frozen=True, slots=True)
class LossMemory:
    """Bytes of one micro batch of the last stage."""

    kept: int
    """Bytes from the forward pass to the head's backward pass, in addition to the gradient of its input."""
    more: int
    """The addition at the peak."""
    fragmented: int = 0
    """Fragmented memory of the logits, which the loss frees: smaller than any of its own tensors, they leave a
    hole."""


def loss_memory(setting: MemorySetting) -> LossMemory:
    logits = setting.shape.tokens * setting.vocabulary
    if setting.whole_logits is not None:
        kept, more = setting.whole_logits
        return LossMemory(logits * kept, logits * more, logits * setting.compute)
    shape, run, compute, wide = setting.shape, setting.run, setting.compute, setting.loss
    pieces = ceil(logits / LOGITS_AT_ONCE)
    piece = ceil(shape.tokens / pieces) * setting.vocabulary
    # With adapters the head is frozen: its weights have no gradient.
    frozen = setting.config.lora.rank > 0
    weights = 0 if frozen else setting.vocabulary * shape.hidden
    kept = weights * (wide if pieces > 1 else compute)
    # Its input, and the operand of the products if that is another tensor.
    hidden = shape.tokens // shape.shares * shape.hidden * run.stream
    if run.autocast or setting.vocabulary_parallel:
        hidden += shape.tokens * shape.hidden * compute
    softmax = piece * (compute + (compute if run.fused else wide))
    if wide > compute and not setting.gpu and not run.fused:
        softmax += piece * wide
    product = piece * compute + weights * compute
    # The gradient of the weights exists from the first chunk's product on.
    forward = hidden + max(softmax, product) - (kept if pieces == 1 else 0)
    backward = weights * compute + shape.tokens * shape.hidden * compute
    return LossMemory(kept, max(forward, backward))
