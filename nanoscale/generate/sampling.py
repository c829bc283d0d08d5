"""Sampling of the next token."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class NotFiniteError(Exception):
    """The model's logits are not finite numbers."""


@dataclass(frozen=True)
class Sampling:
    """The settings of sampling."""

    temperature: float = 0.7
    """The divisor of the logits; 0: always the most likely token."""
    top_k: int | None = None
    """Sample among this many most likely tokens; None: among all."""
    top_p: float | None = None
    """Sample among the fewest most likely tokens with this total probability; None: among all."""


def choose(logits: Tensor, sampling: Sampling, generators: Sequence[torch.Generator]) -> list[int]:
    """Sample a token from each row of logits `[rows, vocab]`, each with its own generator.

    The temperature comes first, then top-k, then top-p (Holtzman et al. 2019, arXiv:1904.09751, section 3.1)
    of the rest, as in transformers. Sampling runs in host memory: a seed gives the same tokens on every
    device, as far as the logits are equal.

    Raises:
        NotFiniteError: a logit is NaN, or infinite.
    """
    if not logits.isfinite().all():
        raise NotFiniteError
    if sampling.temperature == 0:
        most_likely: list[int] = logits.argmax(-1).tolist()
        return most_likely
    rows = logits.float().cpu()
    return [_draw(row, sampling, one) for row, one in zip(rows, generators, strict=True)]


def _draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    values, tokens = logits, torch.arange(len(logits))
    if sampling.top_k is not None and sampling.top_k < len(logits):
        values, tokens = logits.topk(sampling.top_k)
    elif sampling.top_p is not None:  # which needs the largest first
        values, tokens = logits.sort(descending=True, stable=True)
    # The largest is subtracted first: a small temperature would make the numbers overflow.
    probability = ((values - values.max()) / sampling.temperature).softmax(0)
    if sampling.top_p is not None:
        before = probability.cumsum(0) - probability
        probability = probability[before < sampling.top_p]
    return int(tokens[torch.multinomial(probability, 1, generator=generator)])
