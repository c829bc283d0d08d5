"""The bytes that our blocks keep and need, measured on a CPU, compared with the planner's sums."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from nanoscale.config.schema import Model, Parallel
from nanoscale.models.rope import rope_rotation
from nanoscale.models.transformer import Transformer
from nanoscale.parallel import activation
from nanoscale.plan.memory.activations import shape_of, stage_activations
from nanoscale.plan.memory.block_shape import Execution
from nanoscale.rehearse.played.live_memory import LiveMemory
from tests.support.rows import usual_rows

LLAMA = Model(
    layers=6,
    hidden=64,
    heads=8,
    kv_heads=8,
    head_dim=8,
    ffn=176,
    vocab=64,
    max_seq_len=256,
    norm="rmsnorm",
)
GROUPED = replace(LLAMA, kv_heads=4)
GPT = replace(LLAMA, norm="layernorm", mlp="gelu", position="learned", bias=True)
QWEN3 = replace(GROUPED, qk_norm=True)
GEMMA = replace(QWEN3, norm="rmsnorm1p", norm_position="both", mlp="geglu")
OLMO2 = replace(QWEN3, norm_position="after", qk_norm_whole=True)
CAPPED = replace(GROUPED, attention_softcap=2.0)
BATCH, SEQ = 2, 256

MODES: list[dict[str, Any]] = [
    {"activation_checkpointing": "none"},
    {"activation_checkpointing": "full"},
    {"activation_checkpointing": "full", "checkpoint_every": 2},
    {"activation_checkpointing": "selective", "selective_keep": "attention"},
    {"activation_checkpointing": "selective", "selective_keep": "matmuls"},
    {"activation_checkpointing": "selective", "selective_keep": "every-2nd-matmul"},
    {"activation_checkpointing": "sqrt"},
]
SHAPES = {
    "llama bf16": (LLAMA, "bf16"),
    "grouped fp32": (GROUPED, "fp32"),
    "gpt fp32": (GPT, "fp32"),
    "qwen3 fp32": (QWEN3, "fp32"),
    "gemma fp32": (GEMMA, "fp32"),
    "olmo2 fp32": (OLMO2, "fp32"),
    "bounded scores fp32": (CAPPED, "fp32"),
}
ROWS = {
    f"{name}-{'-'.join(map(str, mode.values()))}": (*shape, mode)
    for name, shape in SHAPES.items()
    for mode in MODES
}
USUAL = [name for name in ROWS if name.startswith("grouped")]
USUAL += [
    f"{name} fp32-{mode}"
    for name in ("gpt", "bounded scores")
    for mode in ("none", "selective-attention")
]


def run(model: Model, parallel: Parallel, dtype: torch.dtype, autocast: bool) -> tuple[int, int]:
    """Bytes that are held between forward and backward pass, and the most above the bytes before, with
    gradients."""
    part = Transformer(model).to(torch.float32 if autocast else dtype)
    activation.apply(part.layers, parallel)
    loop = activation.make_run_layers(parallel, part.run_layers)
    stream = torch.float32 if autocast else dtype
    rotation = None
    if model.position == "rope":
        rotation = rope_rotation(model, torch.arange(SEQ), stream, SEQ)
    for parameter in part.parameters():  # gradients exist before, and are only accumulated
        parameter.grad = torch.zeros_like(parameter)
    with LiveMemory() as memory:
        for parameter in part.parameters():
            memory.see_storage(parameter.untyped_storage())
        before = memory.live
        hidden = torch.randn(BATCH, SEQ, model.hidden, dtype=stream).requires_grad_()
        gc.collect()
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            out = loop(part.layers, hidden, (rotation, rotation), (None, None))
        gc.collect()
        kept = memory.live - before - out.nbytes
        memory.reset_peak()
        out.backward(torch.ones_like(out))
        return kept, memory.peak - before - out.nbytes


@pytest.mark.slow
@pytest.mark.parametrize("row", usual_rows(ROWS, USUAL))
def test_what_blocks_keep(row: tuple[Model, str, dict[str, Any]]) -> None:
    shape, precision, mode = row
    dtype, size = {"fp32": (torch.float32, 4), "bf16": (torch.bfloat16, 2)}[precision]
    parallel = Parallel(dp=1, virtual_stages=1, **mode)
    kept, peak = run(shape, parallel, dtype, autocast=False)
    execution = Execution(
        compute=size,
        stream=size,
        composed_norm=True,
    )
    plan = stage_activations(
        shape.layers, shape_of(shape, parallel, BATCH, SEQ), execution, parallel
    )
    # FSDP2 casts the rotation for every block, which is not here.
    rotation = shape.layers * SEQ * 8 * size if precision == "bf16" else 0
    assert plan.kept == pytest.approx(kept, rel=0.01, abs=rotation)
    # The highest point of a backward pass is a closed form for one operation, not a simulation of all.
    assert plan.kept + plan.extra == pytest.approx(peak, rel=0.12)
