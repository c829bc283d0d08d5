from __future__ import annotations

import torch

from nanoscale.data.tokenizer import ByteTokenizer
from nanoscale.train.sample import sample
from nanoscale.train.stability import NonFiniteError, require_finite


class Counting:
    """Says that after a byte comes the next one, and after `limit` the document ends."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.longest = 0

    def next_token_logits(self, tokens: list[int]) -> torch.Tensor:
        self.longest = max(self.longest, len(tokens))
        logits = torch.full((320,), -1e9)
        logits[256 if tokens[-1] == self.limit else (tokens[-1] + 1) % 256] = 0
        return logits


def test_sample_continues_the_prompt_within_the_context() -> None:
    model = Counting(limit=999)
    assert sample(model, ByteTokenizer(), "abc", 4, context=3, seed=0) == "abcdefg"
    assert model.longest == 3


def test_sample_ends_with_the_document() -> None:
    assert sample(Counting(ord("f")), ByteTokenizer(), "ab", 40, context=8, seed=0) == "abcdef"


def test_sample_never_draws_what_the_tokenizer_has_not() -> None:
    class Padding:
        def next_token_logits(self, tokens: list[int]) -> torch.Tensor:
            return torch.cat((torch.zeros(257), torch.full((63,), 50.0)))

    assert len(sample(Padding(), ByteTokenizer(), "", 50, context=8, seed=0)) <= 50


def test_non_finite_figures_are_named() -> None:
    import pytest

    require_finite(1, loss=1.0, grad_norm=2.0)
    with pytest.raises(NonFiniteError, match="loss is nan and grad_norm is inf at step 7"):
        require_finite(7, loss=float("nan"), grad_norm=float("inf"))
