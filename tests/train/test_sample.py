from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch._dynamo.utils import counters

from nanoscale.backends.native import NativeEngine
from nanoscale.config.schema import Backend
from nanoscale.data.tokens.tokenizer import ByteTokenizer
from nanoscale.train.evaluations import sample
from nanoscale.train.job import show_sample
from nanoscale.train.stability import NonFiniteError, require_finite
from tests.support.jobs import BYTES, make_config
from tests.support.recipes import changed


class Counting:
    """A model that predicts the next byte after each byte, and the document's end after `limit`."""

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
    require_finite(1, loss=1.0, grad_norm=2.0)
    with pytest.raises(NonFiniteError, match="loss is nan and grad_norm is inf at step 7"):
        require_finite(7, loss=float("nan"), grad_norm=float("inf"))


def test_a_sample_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    config = make_config(
        tmp_path, model=BYTES, precision="fp32", micro_batch=1, backend=Backend(compile="on")
    )
    engine = NativeEngine(config, torch.device("cpu"))
    counters.clear()
    text = sample(engine, ByteTokenizer(), "ab", 4, context=16, seed=0)
    assert text.startswith("ab") and not counters["stats"]["unique_graphs"]
    engine.next_token_logits([1, 2, 3])
    assert counters["stats"]["unique_graphs"], "what is not a sample is compiled again"


def test_a_sample_plans_no_attention_of_cudnn() -> None:
    allowed = []

    class Looking(Counting):
        def next_token_logits(self, tokens: list[int]) -> torch.Tensor:
            allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
            return super().next_token_logits(tokens)

    sample(Looking(999), ByteTokenizer(), "abc", 2, context=3, seed=0)
    assert allowed == [False, False] and torch.backends.cuda.cudnn_sdp_enabled()


def test_a_prompt_of_null_means_no_sample() -> None:
    train = changed("train.sample_prompt=null", "train.sample_tokens=8").config.train
    training: Any = SimpleNamespace(config=SimpleNamespace(train=train))  # without an engine
    show_sample(training, cast(Any, SimpleNamespace(tokenizer=ByteTokenizer())))
