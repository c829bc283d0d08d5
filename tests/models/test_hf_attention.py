"""Attention of transformers' models by ours: documents as if each were alone, on one rank and on several."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nanoscale.common.errors import UserError
from nanoscale.config.schema import Model
from nanoscale.models import hf_attention
from nanoscale.models.attention import AttentionSpan, CausalAttention, DocumentEnds
from nanoscale.models.hf_model import HFModel, require_stages
from tests.support import hf_models
from tests.support.jobs import make_config, packed_data, write_documents, write_tokens
from tests.support.ranks import run_ranks
from tests.support.reference import assert_equal_curves
from tests.support.rows import exhaustive
from tests.train.test_foreign import curves_of

ENDS = [[7, 17, 24], [5, 24, 24]]


def made(folder: Path, family: str, **changes: Any) -> HFModel:
    hf_models.save(family, folder, **changes)
    model = HFModel(hf_models.shape_of(folder), real=True)
    model.hf.load_state_dict(model.hf.from_pretrained(folder).state_dict())
    model.reset_buffers(torch.device("cpu"))
    return model.double()


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt_oss", "gpt2"])
@torch.no_grad()
def test_documents_are_as_if_each_were_alone(family: str, tmp_path: Path) -> None:
    window = {"sliding_window": 4} if family in ("gemma2", "gpt_oss") else {}
    model = made(tmp_path, family, **window)
    model.hf.set_experts_implementation("eager")
    model.hf.set_attn_implementation("eager")
    tokens = torch.randint(64, (2, 24))
    alone = [model(row[None, start:end]) for row, start, end in documents(tokens)]
    expected = torch.cat(alone, 1).view(2, 24, -1)
    assert hf_attention.problem(model.hf) == ""
    model.attend_with(CausalAttention(Model()))
    whole = torch.cat([model(row[None, start:end]) for row, start, end in documents(tokens)], 1)
    torch.testing.assert_close(
        whole.view(2, 24, -1), expected, rtol=1e-5, atol=1e-5
    )  # fp32 softmax
    found = model(tokens, DocumentEnds.of(np.array(ENDS, np.int32)))
    torch.testing.assert_close(found, whole.view(2, 24, -1), rtol=1e-10, atol=1e-10)


def documents(tokens: Tensor) -> list[tuple[Tensor, int, int]]:
    rows = zip(tokens, ENDS, strict=True)
    borders = [(row, *each) for row, ends in rows for each in pairwise([0, *ends])]
    return [it for it in borders if it[2] > it[1]]


def test_what_our_attention_cannot_compute_is_named(tmp_path: Path) -> None:
    model = made(tmp_path / "a", "qwen3")
    model.hf.config.layer_types = ["full_attention", "linear_attention"]
    assert "layers of the kind linear_attention" in hf_attention.problem(model.hf)
    model.hf.config.layer_types, model.hf.config.model_type = None, "doge"
    assert hf_attention.problem(model.hf) == "its attention makes a mask of its own"
    model.hf.model.layers[0].register_parameter("A_log", torch.nn.Parameter(torch.ones(1)))
    assert hf_attention.problem(model.hf).startswith("model.layers.0 passes a state")
    encoder = made(tmp_path / "b", "bart")
    assert "one of transformers' functions" in hf_attention.problem(encoder.hf)
    span = AttentionSpan.whole(1, 4, torch.device("cpu"))
    q = torch.ones(1, 2, 4, 8)
    for mask, keys in (
        (None, q),
        (torch.ones(4, 4), q),
        ("sees later tokens", q),
        (span, q[:, :, :2]),
    ):
        with pytest.raises(
            UserError, match=r"the model's attention .*, which only its own code computes"
        ):
            hf_attention.attend(model, q, keys, keys, mask)
    with pytest.raises(UserError, match="attention reads position_bias"):
        hf_attention.attend(model, q, q, q, span, position_bias=q)


def test_the_mask_of_a_kind_of_layers_is_a_span_or_a_reason() -> None:
    def mask(sees: Any, size: int | None = None) -> Any:
        return hf_attention._span_of_layers(
            mask_function=lambda _row, _head, query, key: sees(query, key), local_size=size
        )

    span = AttentionSpan.whole(1, 8, torch.device("cpu"))
    hf_attention.DOCUMENTS.set((span, False))
    assert mask(lambda query, key: key <= query) == "causal"
    assert mask(lambda query, key: query - 4 < key <= query, 4).window == 4
    assert mask(lambda query, key: True) == mask(lambda query, key: True, 4) == "sees later tokens"
    chunked = mask(lambda query, key: key <= query and key // 4 == query // 4, 4)
    assert chunked == "divides a sequence into chunks of 4 tokens"


@torch.no_grad()
def test_blocks_that_return_tuples_are_divided(tmp_path: Path) -> None:
    whole = made(tmp_path, "falcon")
    count = whole.shape.layers
    stages = [HFModel(whole.shape, real=True, layers=it) for it in (range(1), range(1, count))]
    hidden = tokens = torch.randint(64, (2, 12))
    for stage in stages:
        stage.hf.load_state_dict(whole.hf.state_dict(), strict=False)
        stage.reset_buffers(torch.device("cpu"))
        hidden = stage.double()(hidden)
    torch.testing.assert_close(hidden, whole(tokens), rtol=1e-10, atol=1e-10)


def test_blocks_that_read_more_than_the_stream_are_named(tmp_path: Path) -> None:
    model = made(tmp_path / "a", "qwen3")
    require_stages(model.hf, model.shape)
    model.hf.config.num_kv_shared_layers = 1
    with pytest.raises(ValueError, match="more than the stream .num_kv_shared_layers"):
        require_stages(model.hf, model.shape)
    encoder = made(tmp_path / "b", "bart")
    with pytest.raises(ValueError, match="it has 2 blocks, and config.json 8 layers"):
        require_stages(encoder.hf, encoder.shape)


LAYOUTS: list[Any] = [
    {"parallel": {"cp": 2}, "stage": 1},
    {"parallel": {"cp": 2, "cp_method": "ulysses", "activation_checkpointing": "full"}, "stage": 3},
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt_oss", exhaustive("gemma2"), exhaustive("qwen3")])
@pytest.mark.parametrize("documents", [True, exhaustive(False)])
def test_divided_sequences_train_the_same(family: str, documents: bool, tmp_path: Path) -> None:
    hf_models.save(family, tmp_path / "model", sliding_window=6)
    more = {"model": hf_models.shape_of(tmp_path / "model")}
    if documents:
        write_documents(tmp_path)
        more["data"] = packed_data(tmp_path)
    else:
        write_tokens(tmp_path)
    expected = run_ranks(curves_of, 1, [make_config(tmp_path, **more)])[0][0]
    divided = [make_config(tmp_path, **more, **layout) for layout in LAYOUTS]
    for found in run_ranks(curves_of, 2, divided)[0]:
        # gemma2's own norms are in fp32
        assert_equal_curves(found, expected, "fp32" if family == "gemma2" else "fp64")
