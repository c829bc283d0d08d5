"""Law 1: every data-parallel layout trains the same model."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from nanoscale.config.schema import Config, Optimizer
from nanoscale.models.initialization import initialise
from nanoscale.models.transformer import Transformer
from tests.jobs import (
    SAMPLES,
    SEQ_LEN,
    SHAPE,
    STEPS,
    make_config,
    make_run,
    read_metrics,
    train,
    write_tokens,
)

LAYOUTS = [  # dp, ZeRO stage, dp_replicate
    (1, 0, 1),
    *((dp, stage, 1) for dp in (2, 4) for stage in (0, 1, 2, 3)),
    *((4, stage, 2) for stage in (1, 2, 3)),
]
BOUNDS = {"fp64": (1e-9, 1e-9), "fp32": (1e-5, 1e-3)}  # loss, gradient norm: the law
CURVE = list[tuple[float, float, float, int]]
"""loss, gradient norm, learning rate and tokens so far, by step"""


@cache
def plain_loop(precision: str, optimizer: str) -> CURVE:
    """What each step logs, in plain PyTorch, with no code of ours but the model.

    The corpus holds as many samples as a global batch, so that every order of samples gives the same batches.
    """
    dtype = {"fp64": torch.float64, "fp32": torch.float32}[precision]
    tokens = np.random.default_rng(7).integers(0, SHAPE.vocab, SAMPLES * SEQ_LEN + 1)
    windows = [tokens[i * SEQ_LEN : (i + 1) * SEQ_LEN + 1] for i in range(SAMPLES)]
    batch = torch.tensor(np.stack(windows))
    model = Transformer(SHAPE).to(dtype)
    initialise(model, SHAPE, seed=3)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    if optimizer == "adamw":
        update = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    else:
        update = torch.optim.SGD(groups, lr=1e-2, momentum=0.9, weight_decay=0.1)
    curve = []
    for step in range(1, STEPS + 1):
        falling = 0.1 + 0.9 * (1 + math.cos(math.pi * (step - 3) / (STEPS - 3))) / 2
        for group in update.param_groups:
            group["lr"] = 1e-2 * (step / 3 if step < 3 else falling)
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, SHAPE.vocab), batch[:, 1:].reshape(-1))
        update.zero_grad()
        loss.backward()
        norm = torch.sqrt(sum((p.grad**2).sum() for p in model.parameters()))
        for parameter in model.parameters():
            parameter.grad *= min(1.0, 0.5 / (norm.item() + 1e-6))  # as torch does
        update.step()
        lr = update.param_groups[0]["lr"]
        curve.append((loss.item(), norm.item(), lr, step * SAMPLES * SEQ_LEN))
    return curve


def our_curve(config: Config) -> CURVE:
    run = make_run(config)
    assert train(run, config) == ["completed"] * config.parallel.dp
    names = ("loss", "grad_norm", "lr", "tokens")
    return [tuple(record[name] for name in names) for record in read_metrics(run)]


def worst(ours: CURVE, reference: CURVE) -> tuple[float, float]:
    """The largest relative difference in loss and in gradient norm."""
    difference = np.abs(np.array(ours) - np.array(reference)) / np.abs(np.array(reference))
    return tuple(difference.max(axis=0)[:2])


def assert_equal_curves(ours: CURVE, reference: CURVE, precision: str) -> None:
    assert len(ours) == len(reference) == STEPS
    np.testing.assert_allclose([row[2:] for row in ours], [row[2:] for row in reference], 1e-12)
    loss, norm = worst(ours, reference)
    loss_bound, norm_bound = BOUNDS[precision]
    assert loss <= loss_bound, f"loss differs by {loss:.1e}"
    assert norm <= norm_bound, f"gradient norm differs by {norm:.1e}"


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize(("dp", "stage", "dp_replicate"), LAYOUTS)
def test_layout_equals_plain_loop(
    tmp_path: Path, dp: int, stage: int, dp_replicate: int, precision: str
) -> None:
    write_tokens(tmp_path)
    config = make_config(
        tmp_path, dp=dp, stage=stage, dp_replicate=dp_replicate, precision=precision
    )
    reference = plain_loop(precision, "adamw")
    assert any(norm > 0.5 for _, norm, *_ in reference), "clipping must be active"
    assert any(norm < 0.5 for _, norm, *_ in reference), "and not always"
    assert_equal_curves(our_curve(config), reference, precision)


@pytest.mark.parametrize(("dp", "stage"), [(1, 0), (2, 0), (2, 3)])
def test_sgd_equals_plain_loop(tmp_path: Path, dp: int, stage: int) -> None:
    write_tokens(tmp_path)
    sgd = Optimizer(name="sgd", lr=1e-2, clip_norm=0.5)
    config = make_config(tmp_path, dp=dp, stage=stage, optimizer=sgd)
    assert_equal_curves(our_curve(config), plain_loop("fp64", "sgd"), "fp64")


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_accumulation_changes_nothing(tmp_path: Path, micro_batch: int) -> None:
    write_tokens(tmp_path)
    config = make_config(tmp_path, dp=2, stage=2, micro_batch=micro_batch)
    assert_equal_curves(our_curve(config), plain_loop("fp64", "adamw"), "fp64")


def test_order_of_samples_is_the_same_in_every_layout(tmp_path: Path) -> None:
    """With a corpus of many global batches, where another order would give other losses."""
    write_tokens(tmp_path, samples=100)
    curves = []
    for dp, stage in ((1, 0), (2, 3), (4, 1)):
        root = tmp_path / f"dp{dp}"
        config = make_config(tmp_path, dp=dp, stage=stage)
        config = replace(config, run=replace(config.run, root=str(root)))
        curves.append(our_curve(config))
    assert_equal_curves(curves[1], curves[0], "fp64")
    assert_equal_curves(curves[2], curves[0], "fp64")


def test_bf16_follows_fp32(tmp_path: Path) -> None:
    write_tokens(tmp_path, samples=100)
    exact = our_curve(make_config(tmp_path, precision="fp32"))
    for dp, stage in ((1, 0), (2, 0), (2, 2), (2, 3)):
        config = make_config(tmp_path, dp=dp, stage=stage, precision="bf16")
        config = replace(config, run=replace(config.run, root=str(tmp_path / f"{dp}-{stage}")))
        loss, _ = worst(our_curve(config), exact)
        assert 1e-6 < loss < 0.01, "bf16 was not used, or is far off"


def test_tied_embeddings_in_shards(tmp_path: Path) -> None:
    write_tokens(tmp_path)
    tied = replace(SHAPE, tie_embeddings=True)
    curves = []
    for dp, stage in ((1, 0), (2, 3)):
        config = make_config(tmp_path, dp=dp, stage=stage, model=tied)
        config = replace(config, run=replace(config.run, root=str(tmp_path / f"dp{dp}")))
        curves.append(our_curve(config))
    assert_equal_curves(curves[1], curves[0], "fp64")
