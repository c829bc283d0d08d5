"""Phases of a training: the same losses as a plain loop in every layout, and exact resumes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.schema import PhaseSettings, Scheduler, Train
from nanoscale.config.training_phases import (
    phase_at,
    phases_of,
    piecewise,
    samples_after,
    steps_for,
)
from nanoscale.data.sampler import due, sample_indices, taken
from nanoscale.models.initialization import initialize
from nanoscale.models.transformer import Transformer
from tests.support.jobs import (
    SAMPLES,
    SEQ_LEN,
    SHAPE,
    ZBV,
    StopBefore,
    assert_same_training,
    assert_same_weights,
    curve,
    make_config,
    make_run,
    never_stopped,
    resumed_at,
    saving_config,
    train,
    write_tokens,
)
from tests.support.layouts import train_all
from tests.support.ranks import run_ranks
from tests.support.reference import CURVE, assert_equal_curves
from tests.support.rows import exhaustive

PHASES = {
    "short": PhaseSettings(until=2, seq_len=SEQ_LEN // 2, lr=1.0),
    "wide": PhaseSettings(until=4, global_batch=2 * SAMPLES, lr=0.5),
    "last": PhaseSettings(lr=0.1),
}
SCHEDULE = [(8, 8, 1), (8, 8, 1), (16, 16, 0.75), (16, 16, 0.5), (16, 8, 0.3), (16, 8, 0.1)]
"""Length, batch and multiple of the rate in each step."""
STORED = 100
"""The samples of the token file."""


def with_phases(config: ResolvedConfig, steps: int = 6) -> ResolvedConfig:
    return replace(
        config,
        scheduler=Scheduler("piecewise"),
        train=replace(config.train, steps=steps, phases=PHASES),
    )


def plain_loop(tokens: np.ndarray) -> CURVE:
    model = Transformer(SHAPE).double()
    initialize(model, SHAPE, seed=3)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1]},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.1)
    curve, seen = [], 0
    for length, batch, factor in SCHEDULE:
        order = sample_indices(3, np.arange(seen, seen + batch), STORED)
        rows = [tokens[i * SEQ_LEN : (i + 1) * SEQ_LEN + 1] for i in order]
        inputs = torch.tensor(np.stack([row[:-1] for row in rows])).reshape(-1, length)
        targets = torch.tensor(np.stack([row[1:] for row in rows])).reshape(-1)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * factor
        optimizer.step()
        seen += batch
        curve.append((loss.item(), norm, 1e-2 * factor, seen * SEQ_LEN))
    return curve


@pytest.mark.slow
@pytest.mark.parametrize(
    ("degrees", "stage"),
    [
        ({}, 0),
        ({"dp": 2}, 3),
        ({"pp": 2, "tp": 2}, 0),
        exhaustive(ZBV | {"dp": 2}, 1),
        ({"cp": 2}, 0),
    ],
    ids=str,
)
def test_phases_equal_a_plain_loop(tmp_path: Path, degrees: dict[str, Any], stage: int) -> None:
    tokens = write_tokens(tmp_path, STORED)
    dp = degrees.get("dp", 1)
    config = with_phases(make_config(tmp_path, dp=dp, stage=stage, parallel=degrees, micro_batch=2))
    (ours,) = run_ranks(train_all, config.world_size, [config])[0]
    assert_equal_curves(ours, plain_loop(tokens), "fp64")


@pytest.mark.slow
def test_a_resume_within_a_phase_is_exact(tmp_path: Path) -> None:
    write_tokens(tmp_path, STORED)
    config = with_phases(saving_config(tmp_path, dp=2, stage=3))
    run = make_run(config)
    train(run, config, StopBefore(3))
    train(run, config)
    assert resumed_at(run) == [3]
    whole = never_stopped(tmp_path, config)
    assert_same_training(run, whole)
    assert_same_weights(run, whole)


@pytest.mark.slow
def test_a_resume_in_another_layout_has_the_same_phases(tmp_path: Path) -> None:
    write_tokens(tmp_path, STORED)
    config = with_phases(saving_config(tmp_path, precision="fp64"))
    run = make_run(config)
    train(run, config, StopBefore(3))
    train(run, replace(config, parallel=replace(config.parallel, pp=2)))
    for ours, whole in zip(curve(run), curve(never_stopped(tmp_path, config)), strict=True):
        assert ours == pytest.approx(whole, rel=1e-9)


def test_steps_samples_and_tokens_of_phases() -> None:
    settings = Train(global_batch=8, seq_len=16, steps=100, phases={
        "a": PhaseSettings(until_tokens=1000), "b": PhaseSettings(until=20, global_batch=16),
        "c": PhaseSettings(),
    })  # fmt: skip
    assert [(it.first, it.last) for it in phases_of(settings)[:2]] == [(0, 8), (8, 20)]
    sizes = [phase_at(settings, step).global_batch for step in range(1, 31)]
    for steps in range(1, 31):
        assert samples_after(settings, steps) == sum(sizes[:steps])
        assert steps_for(settings, sum(sizes[:steps])) == steps
        assert steps_for(settings, sum(sizes[:steps]) - 0.5) == steps


def test_piecewise_rates_are_numpys_interpolation() -> None:
    ends = {"a": (10, 1.0), "b": (30, 0.2), "c": (None, 0.6)}
    phases = {name: PhaseSettings(until=last, lr=lr) for name, (last, lr) in ends.items()}
    settings = Train(steps=40, phases=phases)
    found = [piecewise(settings, step) for step in range(1, 41)]
    expected = np.interp(range(1, 41), [0, 10, 30, 40], [1.0, 1.0, 0.2, 0.6])
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("weights", [[0.5, 0.3, 0.2], [1.0, 0.0, 2.0], [1e-3, 1, 7]])
def test_samples_taken_of_each_source(weights: list[float]) -> None:
    shares = np.array(weights) / sum(weights)
    sources, _ = due(shares, 0, 500)
    for count in (0, 1, 7, 100, 499):
        np.testing.assert_array_equal(
            taken(shares, count), np.bincount(sources[:count], minlength=3)
        )
