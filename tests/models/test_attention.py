"""Attention within documents and windows, with bounded scores and sinks, compared with a mask of all pairs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from nanoscale.config.schema import Model, Parallel
from nanoscale.data.batch import Batch
from nanoscale.models.attention import (
    PASSES,
    AttentionSpan,
    DocumentEnds,
    dense_attention,
    limited_attention,
)
from nanoscale.models.attention_kernels import KERNELS, Attended, Limits, Pairs
from nanoscale.models.transformer import Transformer
from nanoscale.parallel import activation

ROWS, SEQ, HEADS, KV_HEADS, HEAD_DIM = 2, 300, 4, 2, 8
DOCUMENTS = (np.arange(SEQ) >= np.array([[0, 5, 270, 290], [100, 101, 102, 0]])[..., None]).sum(1)
"""Documents of 1 to 265 tokens, in more than one block of queries."""


def batch_of(documents: np.ndarray) -> Batch:
    tokens = np.random.default_rng(0).integers(0, 64, documents.shape)
    return Batch(tokens, np.roll(tokens, -1, 1), documents)


def documents_of(numbers: np.ndarray) -> DocumentEnds:
    ends = batch_of(numbers).ends()
    assert ends is not None
    return DocumentEnds.of(ends)


@pytest.mark.parametrize(
    ("has_documents", "window", "softcap", "has_sinks"),
    [*product((True, False), (None, 7, 290), (None, 2.0), (True, False))],
)
def test_it_equals_attention_with_a_dense_mask(
    has_documents: bool, window: int | None, softcap: float | None, has_sinks: bool
) -> None:
    torch.manual_seed(0)
    shapes = [(ROWS, heads, SEQ, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    leaves = [torch.randn(it, dtype=torch.float64) for it in [*shapes, *[(HEADS,)] * has_sinks]]
    q, k, v, *learned = (it.requires_grad_() for it in leaves)
    sinks = learned[0] if learned else None
    numbers = torch.from_numpy(DOCUMENTS if has_documents else np.zeros_like(DOCUMENTS))
    index = torch.arange(SEQ)
    mask = (numbers[:, :, None] == numbers[:, None]) & (index <= index[:, None])
    mask &= index > index[:, None] - (window or SEQ)
    span = AttentionSpan.of(documents_of(numbers.numpy()), SEQ)._replace(window=window)
    ours = limited_attention(q, k, v, span, sinks, "portable", softcap)
    dense = dense_attention(q, k, v, mask[:, None], softcap, sinks)
    grad = torch.randn_like(dense)
    torch.testing.assert_close(ours, dense, rtol=0, atol=1e-13)
    pairs = zip(*(torch.autograd.grad(it, leaves, grad) for it in (ours, dense)), strict=True)
    for found, expected in pairs:
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_the_operation_says_what_it_returns() -> None:
    q, k = (torch.randn(ROWS, heads, SEQ, HEAD_DIM) for heads in (HEADS, KV_HEADS))
    starts, longest, _ = AttentionSpan.of(documents_of(DOCUMENTS), SEQ)
    assert longest == 265
    given = (q, k, k, torch.zeros(HEADS), starts, longest, "portable", 1.0, 5, 2.0)
    torch.library.opcheck(
        PASSES["attention"].forward, given, test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_a_compiled_block_computes_the_same_for_any_number_of_documents(mode: Any) -> None:
    """It is compiled once for one number, and once for all others."""
    torch._dynamo.reset()
    compiled = []

    def compiler(graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        compiled.append(graph)
        return aot_eager(graph, inputs)

    shape = Model(layers=1, hidden=16, heads=2, kv_heads=1, ffn=16, vocab=64, max_seq_len=SEQ)
    shape = replace(shape, attention_sinks=True, sliding_window=7)
    models = []
    for compile_block in (lambda it: it, partial(torch.compile, backend=compiler, fullgraph=True)):
        torch.manual_seed(0)
        models.append(model := Transformer(shape).double())
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        layout = Parallel(dp=1, virtual_stages=1, activation_checkpointing=mode)
        activation.apply(model.layers, layout)
        block = model.layers["0"]
        block.forward = compile_block(block.forward)  # type: ignore[method-assign, operator]
    for count in (1, 3, 4, 2):
        batch = batch_of(np.broadcast_to(np.arange(SEQ) * count // SEQ, (ROWS, SEQ)))
        inputs, targets = torch.from_numpy(batch.inputs), torch.from_numpy(batch.targets)
        gradients = []
        for model in models:
            loss = model(inputs, DocumentEnds.of(batch.ends()), targets)
            gradients.append(torch.autograd.grad(loss, [*model.parameters()]))
        for plain, found in zip(*gradients, strict=True):
            torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-12)
    assert len(compiled) == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU of NVIDIA")
@pytest.mark.parametrize(
    ("causal", "window", "earlier"),
    [(True, None, 0), (True, 7, 0), (True, 7, SEQ // 2), (False, None, 0)],
)
def test_flash_attention_equals_the_portable_kernel(
    causal: bool, window: int | None, earlier: int
) -> None:
    """Not causal, or with earlier keys: as in a ring, where some documents have only queries or only keys."""
    torch.manual_seed(0)
    q, k, v, grad = (
        torch.randn(ROWS, heads, SEQ, 64, device="cuda").bfloat16()
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    q, grad = q[:, :, earlier:], grad[:, :, earlier:]
    ends, longest = documents_of(DOCUMENTS)
    starts = AttentionSpan.of(DocumentEnds(ends, longest), SEQ).starts.cuda()
    later = DocumentEnds((ends - earlier).clamp(min=0), longest)
    queries = AttentionSpan.of(later, SEQ - earlier).starts.cuda()
    lengths = starts.diff().view(ROWS, -1)  # of keys
    if not causal:  # the first document has none
        lengths[:, 1] += lengths[:, 0]
        lengths[:, 0] = 0
    keys = torch.nn.functional.pad(lengths.flatten().cumsum(0, dtype=torch.int32), (1, 0))
    limits = Limits(queries, keys, longest if causal else 2 * longest, window)
    portable, flash = KERNELS["portable"], KERNELS["flash-cuda"]
    pairs = Pairs(causal, 0.125, limits)
    out, lse = portable.forward(q, k, v, pairs)
    lse = lse.clamp(min=-10)
    for run in ("forward", "backward"):
        given = (q, k, v) if run == "forward" else (grad, Attended(q, k, v, out.bfloat16(), lse))
        found, expected = (getattr(kernel, run)(*given, pairs) for kernel in (flash, portable))
        for x, y in zip(found, expected, strict=True):
            x, y = x.nan_to_num(neginf=-10), y.nan_to_num(neginf=-10)
            assert float((x - y).abs().max() / y.abs().max()) <= 0.03
