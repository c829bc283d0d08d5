"""A cache of keys and values changes no logit."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from nanoscale.config.hf.shape import read_shape
from nanoscale.config.schema import Model
from nanoscale.models.initialization import initialize
from nanoscale.models.kv_cache import Cache, without_cudnn_attention
from nanoscale.models.transformer import Transformer
from tests.support.hf_families import FAMILIES, OF_ANY_LENGTH, save, tokens
from tests.support.jobs import SHAPE

MOE = replace(SHAPE, experts=4, experts_per_token=2)


def shape_of(family: str, folder: Path) -> Model:
    if family == "experts":
        return MOE
    save(family, folder)
    return read_shape(folder)


@pytest.mark.parametrize("family", [*FAMILIES, "experts"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_logits_are_those_without_it(
    family: str, dtype: torch.dtype, bound: float, tmp_path: Path
) -> None:
    shape = replace(shape_of(family, tmp_path), init_std=0.2)
    model = Transformer(shape).to(dtype)
    initialize(model, shape, seed=4)
    ids = tokens(20)
    with torch.no_grad():
        expected = model(ids)
    cache = Cache(model, batch=2, max_length=20)
    cuts = [0, 5, 6, 7, 14, 20]  # one token and several, after some and after none
    parts = [cache.logits(ids[:, a:b]) for a, b in pairwise(cuts)]
    found = torch.cat(parts, dim=1)
    assert expected.std() > 0.1 and found.dtype == dtype
    assert (found - expected).abs().max() <= bound * expected.abs().max()
    again = Cache(model, batch=2, max_length=20).logits(ids, last_only=True)
    assert again.shape == (2, 1, shape.vocab) and cache.lengths.tolist() == [20, 20]
    assert (again - expected[:, -1:]).abs().max() <= bound * expected.abs().max()


@pytest.mark.parametrize("family", [*OF_ANY_LENGTH, "experts"])
def test_sequences_of_different_lengths_do_not_see_each_other(family: str, tmp_path: Path) -> None:
    """Also after one of them is dropped, and where several tokens are added to each."""
    shape = replace(shape_of(family, tmp_path), init_std=0.2)
    model = Transformer(shape).double()
    initialize(model, shape, seed=4)
    ids = tokens(20)
    ids = torch.cat([ids, ids.flip(0)[:1].roll(3, 1)])
    with torch.no_grad():
        expected = model(ids)
    cache = Cache(model, batch=3, max_length=20)
    seen, rows = [0, 0, 0], [0, 1, 2]
    for step, counts in enumerate(([3, 9, 1], [1, 1, 1], [4, 1, 2], [1, 1], [2, 5], [1, 1])):
        if step == 3:
            rows = [0, 2]
            cache.keep(rows)
        new = torch.full((len(rows), max(counts)), 7)  # padding is not seen
        for line, row, count in zip(new, rows, counts, strict=True):
            line[:count] = ids[row, seen[row] : seen[row] + count]
            seen[row] += count
        found = cache.logits(new, torch.tensor(counts), last_only=True)
        for line, row in zip(found[:, 0], rows, strict=True):
            difference = (line - expected[row, seen[row] - 1]).abs().max()
            assert difference <= 1e-10 * expected.abs().max(), (step, row)
        assert cache.lengths.tolist() == [seen[row] for row in rows]


def test_decoding_keeps_from_cudnn_which_plans_anew_for_every_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allowed = []
    attention = F.scaled_dot_product_attention

    def look(*args: Any, **more: Any) -> Tensor:
        allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
        return attention(*args, **more)

    monkeypatch.setattr(F, "scaled_dot_product_attention", look)
    shape = Model(layers=2, vocab=64)
    cache = Cache(Transformer(shape), 1, 8)
    cache.logits(torch.arange(3)[None])
    cache.logits(torch.arange(1)[None])
    assert allowed == [False] * 4 and torch.backends.cuda.cudnn_sdp_enabled()


def test_decoding_leaves_cudnn_to_whoever_allows_nothing_else() -> None:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), without_cudnn_attention():
        assert torch.backends.cuda.cudnn_sdp_enabled()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), without_cudnn_attention():
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cuda.flash_sdp_enabled()
