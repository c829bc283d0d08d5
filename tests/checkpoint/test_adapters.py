"""Checkpoints of adapters: without the frozen model, bit-exact, merged into what transformers computes with."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch._dynamo.utils import counters
from torch.nn import functional as F

from nanoscale.backends import low_bits
from nanoscale.checkpoint import store
from nanoscale.checkpoint.hf import load
from nanoscale.checkpoint.hf.adapters import require_base
from nanoscale.checkpoint.hf.export import export
from nanoscale.common.errors import UserError
from nanoscale.config.hf.shape import read_shape
from nanoscale.config.schema import Backend, Checkpoint, Config, Lora
from nanoscale.models import lora
from nanoscale.models.transformer import Transformer
from nanoscale.runs.directory import RunDirectory
from tests.checkpoint.test_export import from_pretrained, quiet
from tests.support.hf_families import logits, save
from tests.support.jobs import (
    PRECISIONS,
    SAMPLES,
    SEQ_LEN,
    SHAPE,
    StopBefore,
    curve,
    make_config,
    make_run,
    resumed_at,
    train,
    write_tokens,
)
from tests.support.rows import exhaustive

STEPS = 7
STOP = 4
IN_4_BITS: tuple[dict[str, Any], ...] = (
    {},
    {"dp": 2},
    {"dp": 4, "dp_replicate": 2, "stage": 2},
    {"pp": 2, "dp": 2, "stage": 1},
    {"dp": 2, "cp": 2, "stage": 3, "activation_checkpointing": "full"},
)


def config_for(folder: Path, base: Path, **degrees: Any) -> Config:
    """Return a job with a corpus of one global batch, so that every step sees all of it."""
    config = make_config(
        folder,
        dp=degrees.get("dp", 1),
        stage=degrees.pop("stage", 0),
        model=replace(read_shape(base), init_from=str(base)),
        precision="fp32",
        parallel=degrees,
        lora=Lora(rank=3, alpha=6.0),
        checkpoint=Checkpoint(keep_last=None),
    )
    return replace(config, train=replace(config.train, steps=STEPS))


def loss_of(model: Any, tokens: np.ndarray) -> float:
    """Return the loss of the whole corpus, computed by transformers."""
    rows = [tokens[i * SEQ_LEN : (i + 1) * SEQ_LEN + 1] for i in range(SAMPLES)]
    batch = torch.tensor(np.stack(rows))
    found = logits(model, batch[:, :-1])
    return F.cross_entropy(found.flatten(0, 1), batch[:, 1:].flatten()).item()


def newest(run: RunDirectory) -> store.StoredCheckpoint:
    return store.list_checkpoints(run.checkpoints)[-1]


def test_blocks_in_4_bits_are_one_graph() -> None:
    """Two blocks compile once, and compute with the weights that torchao reads from the same codes."""
    pytest.importorskip("torchao")
    with torch.device("meta"):
        model = Transformer(SHAPE).double()
    low_bits.prepare_nf4(model)
    low_bits.quantize_nf4(model, torch.float64, torch.device("cpu"))
    model.materialize(torch.device("cpu"))
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data.copy_(0.2 * torch.randn(parameter.shape, dtype=torch.float64))
    tokens = torch.randint(SHAPE.vocab, (2, 8))
    expected = model(tokens)
    layer: Any = model.layers["0"].mlp.down
    weight = low_bits.dequantize(*(*layer.parts, layer.in_features))
    assert torch.equal(weight, layer.weight.get_original_weight())
    counters.clear()
    for block in model.layers.values():
        block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(model(tokens), expected, rtol=1e-12, atol=1e-12)
    assert counters["stats"]["unique_graphs"] == 1


def test_blocks_with_adapters_compile_once() -> None:
    """The first block twice: its input needs no gradient."""
    model = Transformer(replace(SHAPE, layers=4))
    lora.attach(model, Lora(rank=2))
    for parameter in model.parameters():
        parameter.data.fill_(0.1)
    torch._dynamo.reset()
    counters.clear()
    for block in model.layers.values():
        block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)
    model(torch.randint(SHAPE.vocab, (2, 8))).sum().backward()
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["off", exhaustive("on")])  # it writes code for a minute
def test_a_base_in_4_bits(compiled: Literal["off", "on"], tmp_path: Path) -> None:
    """The losses of a base whose weights were quantized beforehand, and the same after a resume."""
    pytest.importorskip("torchao")
    write_tokens(tmp_path)
    save("qwen3", tmp_path / "base")
    shutil.copytree(tmp_path / "base", tmp_path / "rounded")
    file = tmp_path / "rounded/model.safetensors"
    rounded_weights = load_file(file)
    for name, weight in rounded_weights.items():
        if name.endswith("proj.weight"):
            quantized: Any = low_bits.to_nf4(weight)
            rounded_weights[name] = quantized.get_original_weight()
    save_file(rounded_weights, file, {"format": "pt"})
    plain = config_for(tmp_path, tmp_path / "rounded")
    config = config_for(tmp_path, tmp_path / "base")
    backend = replace(config.backend, compile=compiled)
    config = replace(config, lora=replace(config.lora, base="nf4"), backend=backend)
    whole, run, rounded = (make_run(*it) for it in ((config, "a"), (config, "b"), (plain, "c")))
    train(whole, config)
    train(rounded, plain)
    losses, expected = ([record["loss"] for record in curve(it)] for it in (whole, rounded))
    assert losses == pytest.approx(expected, rel=1e-6) and losses[-1] < losses[0] - 0.01
    train(run, config, StopBefore(STOP))
    train(run, config)
    (station,) = resumed_at(run)
    assert 0 < station < STEPS and curve(run) == curve(whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "layouts"),
    [("fp64", IN_4_BITS[:1] + IN_4_BITS[-1:]), exhaustive("bf16", IN_4_BITS)],
)
def test_a_base_in_4_bits_in_other_layouts(
    precision: str, layouts: tuple[dict[str, Any], ...], tmp_path: Path
) -> None:
    """The losses of one process, also after a resume by one process."""
    pytest.importorskip("torchao")
    write_tokens(tmp_path)
    save("llama", tmp_path / "base")
    bound = 1e-9 if precision == "fp64" else 1e-3
    expected: list[float] = []
    for number, layout in enumerate(layouts):
        config = config_for(tmp_path, tmp_path / "base", **layout)
        config = replace(
            config, lora=replace(config.lora, base="nf4"), precision=PRECISIONS[precision]
        )
        run = make_run(config, str(number))
        train(run, config, StopBefore(STOP) if number else None)
        if number:
            alone = config_for(tmp_path, tmp_path / "base")
            train(run, replace(config, parallel=alone.parallel, zero=alone.zero))
        losses = [record["loss"] for record in curve(run)]
        expected = expected or losses
        assert losses == pytest.approx(expected, rel=bound), layout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layout", "dora"),
    [
        ("qwen3", {"dp": 2, "stage": 3}, False),
        ("gpt2", {}, True),
        exhaustive("gpt_oss", {"dp": 2, "tp": 2, "stage": 3}, False),
        exhaustive("qwen2", {"dp": 2, "tp": 2, "stage": 3}, True),
    ],
    ids=str,
)
def test_from_the_base_to_a_merged_model(
    family: str, layout: dict[str, Any], dora: bool, tmp_path: Path
) -> None:
    tokens = write_tokens(tmp_path)
    theirs = save(family, tmp_path / "base", shard="20KB")
    config = config_for(tmp_path, tmp_path / "base", **layout)
    config = replace(config, lora=replace(config.lora, dora=dora))
    whole, run = make_run(config, "whole"), make_run(config)
    train(whole, config)
    losses = [record["loss"] for record in curve(whole)]
    assert losses[0] == pytest.approx(loss_of(theirs, tokens), rel=1e-6)
    assert losses[-1] < losses[0] - 0.01
    train(run, config, StopBefore(STOP))
    stopped = newest(run)
    assert {name.split(".adapter.")[-1] for name in stopped.manifest["tensors"]} == {
        f"{matrix}{moment}"
        for matrix in ("a", "b", *(["magnitude"] if dora else []))
        for moment in ("", ".step", ".exp_avg", ".exp_avg_sq")
    }
    export(stopped, config, tmp_path / "out", "fp32", 20_000, quiet)
    merged = from_pretrained(tmp_path / "out")
    assert loss_of(merged, tokens) == pytest.approx(losses[stopped.step], rel=1e-6)
    begun = replace(config.run, from_run=str(run.path), from_step=stopped.step)
    second = replace(config, run=begun, train=replace(config.train, steps=1))
    begins_there = make_run(second, "begun")
    train(begins_there, second)
    assert curve(begins_there)[0]["loss"] == pytest.approx(losses[stopped.step], rel=1e-6)
    twin = RunDirectory(run.path.with_name("twin"))
    shutil.copytree(run.path, twin.path, symlinks=True)
    train(run, config)
    assert resumed_at(run) == [stopped.step] and curve(run) == curve(whole)
    if layout and not dora:
        elsewhere = config_for(tmp_path, tmp_path / "base", dp=2, stage=3)
        train(twin, replace(elsewhere, backend=Backend(name="deepspeed")))
        for ours, reference in zip(curve(twin), curve(whole), strict=True):
            assert ours["loss"] == pytest.approx(reference["loss"], rel=1e-5)
            assert ours["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-3)


@pytest.mark.slow
def test_the_base_is_known_again(tmp_path: Path) -> None:
    """The fingerprint depends on its numbers, not on its folder and the number of its files."""
    write_tokens(tmp_path)
    save("llama", tmp_path / "base", shard="20KB")
    config = config_for(tmp_path, tmp_path / "base")
    run = make_run(config)
    train(run, replace(config, train=replace(config.train, steps=2)))
    save("llama", tmp_path / "moved")
    held = load_file(tmp_path / "moved" / "model.safetensors")
    shutil.copytree(tmp_path / "moved", tmp_path / "other")
    held["model.layers.1.mlp.up_proj.weight"][0, 0] += 1e-6
    save_file(held, tmp_path / "other" / "model.safetensors")
    shape = read_shape(tmp_path / "moved")
    first, again, other = (
        load.fingerprint(tmp_path / name, shape) for name in ("base", "moved", "other")
    )
    assert first == again != other
    changed = replace(config, model=replace(config.model, init_from=str(tmp_path / "other")))
    with pytest.raises(RuntimeError, match="not have the weights"):
        train(run, changed)
    with pytest.raises(UserError, match="not have the weights"):
        export(newest(run), changed, tmp_path / "out", "fp32", 20_000, quiet)
    assert not (tmp_path / "out").exists()
    shutil.rmtree(tmp_path / "other")
    with pytest.raises(UserError, match="does not exist, and its weights are needed"):
        require_base(changed, run.checkpoints)
    require_base(changed, tmp_path / "nowhere")  # there is no checkpoint yet
