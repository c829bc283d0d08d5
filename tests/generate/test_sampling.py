"""Sampled tokens, compared with the probabilities that transformers computes from the same logits."""

from __future__ import annotations

import pytest
import torch

from nanoscale.generate.sampling import NotFiniteError, Sampling, choose

LOGITS = torch.tensor([0.3, 2.0, -1.0, 1.9, 0.0, 1.0, -4.0, 0.31])
DRAWS = 4000


def warped(sampling: Sampling) -> torch.Tensor:
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    steps = [TemperatureLogitsWarper(sampling.temperature)]
    steps += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []  # type: ignore[list-item]
    steps += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p else []  # type: ignore[list-item]
    scores = LOGITS[None]
    for step in steps:
        scores = step(None, scores)
    found: torch.Tensor = scores[0].softmax(0)
    return found


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0),
        Sampling(0.5),
        Sampling(1.0, top_k=3),
        Sampling(1.5, top_k=50),
        Sampling(1.0, top_p=0.7),
        Sampling(2.0, top_p=0.05),
        Sampling(0.8, top_k=5, top_p=0.9),
    ],
)
def test_tokens_come_as_often_as_they_are_likely(sampling: Sampling) -> None:
    generator = torch.Generator().manual_seed(3)
    drawn = torch.tensor(choose(LOGITS.expand(DRAWS, -1), sampling, [generator] * DRAWS))
    often, expected = torch.bincount(drawn, minlength=8) / DRAWS, warped(sampling)
    assert ((often > 0) <= (expected > 0)).all(), "none that is ruled out"
    assert (often - expected).abs().max() < 5 * 0.5 / DRAWS**0.5  # five standard deviations


def test_the_most_likely_one_and_the_seed() -> None:
    rows, draw = torch.stack([LOGITS, -LOGITS]), [torch.Generator()] * 2
    assert choose(rows, Sampling(0.0), draw) == [1, 6]
    assert choose(1000 * rows, Sampling(1e-5), draw) == [1, 6]
    pair = [torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)]
    drawn = [choose(LOGITS.expand(2, -1), Sampling(1.0), pair) for _ in range(20)]
    assert all(one == other for one, other in drawn) and len({one for one, _ in drawn}) > 2
    for bad in (float("nan"), float("inf")):
        with pytest.raises(NotFiniteError):
            choose(rows.where(rows != 0.3, bad), Sampling(0.0), draw)
