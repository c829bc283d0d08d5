"""Which token comes next."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


class NotFiniteError(Exception):
    """The model has no opinion: its logits are not numbers."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn."""

    temperature: float = 0.7
    """what logits are divided by; 0: always the most likely token"""
    top_k: int | None = None
    """of so many most likely tokens only"""
    top_p: float | None = None
    """and of the fewest that have this probability together"""


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """A token from logits `[vocab]`.

    The temperature comes first, then top-k, then top-p (Holtzman et al. 2019, arXiv:1904.09751, section 3.1) of
    what that left, as in transformers. Drawn in host memory: a seed gives the same tokens on every device, as
    far as the logits are the same.

    Raises:
        NotFiniteError: a logit is NaN, or infinite.
    """
    if not logits.isfinite().all():
        raise NotFiniteError
    if sampling.temperature == 0:
        return int(logits.argmax())
    values, tokens = _most_likely(logits.float().cpu(), sampling)
    # The largest is taken off first: a small temperature would make numbers beyond all bounds.
    probability = ((values - values.max()) / sampling.temperature).softmax(0)
    if sampling.top_p is not None:
        before = probability.cumsum(0) - probability
        probability = probability[before < sampling.top_p]
    return int(tokens[torch.multinomial(probability, 1, generator=generator)])


def _most_likely(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Logits and tokens that come into question; the largest first, where that matters."""
    if sampling.top_k is not None and sampling.top_k < len(logits):
        return logits.topk(sampling.top_k)
    if sampling.top_p is not None:
        return logits.sort(descending=True, stable=True)
    return logits, torch.arange(len(logits))
