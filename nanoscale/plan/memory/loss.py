"""Memory of the head and the loss. nanoscale holds gradients and one chunk of the logits (`models.head`), other
software all logits."""

from dataclasses import dataclass
from math import ceil

from nanoscale.plan.memory.setting import MemorySetting

LOGITS_AT_ONCE = 2**28
"""The same number as in `models.head`; a test compares the two."""


@dataclass(frozen=True, slots=True)
class LossMemory:
    """Bytes of one micro batch of the last stage."""

    kept: int
    """Bytes from the forward pass to the head's backward pass, without the gradient of the head's input."""
    extra: int
    """Bytes that the loss adds to `kept` at its peak."""


def loss_memory(setting: MemorySetting) -> LossMemory:
    logits = setting.shape.tokens * setting.vocabulary
    if setting.whole_logits is not None:
        kept, extra = setting.whole_logits
        return LossMemory(logits * kept, logits * extra)
    shape, run, compute, loss = setting.shape, setting.run, setting.compute, setting.loss
    chunks = ceil(logits / LOGITS_AT_ONCE)
    chunk = ceil(shape.tokens / chunks) * setting.vocabulary
    # With adapters the head is frozen: its weights have no gradient.
    frozen = setting.config.lora.rank > 0
    weights = 0 if frozen else setting.vocabulary * shape.hidden
    kept = weights * (loss if chunks > 1 else compute)
    # The head's input, and a copy of the input if the products need another dtype or the gathered sequence.
    hidden = shape.tokens // shape.shares * shape.hidden * run.stream
    if run.autocast or setting.vocabulary_parallel:
        hidden += shape.tokens * shape.hidden * compute
    softmax = chunk * (compute + (compute if run.fused else loss))
    if loss > compute and not setting.gpu and not run.fused:
        softmax += chunk * loss
    if setting.config.model.logit_softcap is not None:
        softmax += chunk * compute  # the slope of the bound
    product = chunk * compute + weights * compute
    # The gradient of the weights exists from the first chunk's product on.
    forward = hidden + max(softmax, product) - (kept if chunks == 1 else 0)
    backward = weights * compute + shape.tokens * shape.hidden * compute
    return LossMemory(kept, max(forward, backward))
