"""A run that begins with the weights of another one, in any layout."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.schema import Optimizer, Scheduler
from nanoscale.models.moe import BIAS_UNIT
from nanoscale.runs.directory import RunDirectory
from tests.support.jobs import (
    SAMPLES,
    SAVED_STEPS,
    SEQ_LEN,
    SHAPE,
    StopBefore,
    assert_same_weights,
    curve,
    final_weights,
    make_run,
    never_stopped,
    saving_config,
    train,
    write_tokens,
)
from tests.support.rows import exhaustive

STEADY = Scheduler(name="constant", warmup_steps=0)


def from_run(config: ResolvedConfig, source: RunDirectory, **changes: Any) -> ResolvedConfig:
    keys = {"from_run": str(source.path), "from_step": SAVED_STEPS, **changes}
    return replace(config, run=replace(config.run, **keys))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "stage"),
    [({"dp": 2}, 3), exhaustive({"tp": 2, "pp": 2}, 1), exhaustive({}, 0)],
    ids=str,
)
def test_the_weights_are_those_of_the_other_run(
    layout: dict[str, int], stage: int, tmp_path: Path
) -> None:
    write_tokens(tmp_path, samples=100)
    source = never_stopped(tmp_path, saving_config(tmp_path, dp=2, stage=3))
    still = saving_config(
        tmp_path, dp=layout.get("dp", 1), stage=stage, parallel=layout, optimizer=Optimizer(lr=0.0)
    )
    still = replace(from_run(still, source), scheduler=STEADY)
    run = make_run(still, "begun")
    train(run, still)
    before, after = final_weights(source), final_weights(run)
    for name in (name for name in before if name.startswith("model.")):
        assert torch.equal(before[name], after[name]), name
    assert [record["step"] for record in curve(run)] == list(range(1, SAVED_STEPS + 1))


@pytest.mark.slow
def test_it_begins_with_the_average_and_the_preferences_of_experts(tmp_path: Path) -> None:
    write_tokens(tmp_path, samples=100)
    experts = replace(SHAPE, experts=4, experts_per_token=2, balance="bias", balance_rate=0.05)
    averaged = Optimizer(lr=1e-2, ema_decay=0.5)
    config = saving_config(tmp_path, dp=2, stage=3, model=experts, optimizer=averaged)
    source = make_run(config, "source")
    train(source, config)
    still = saving_config(tmp_path, model=experts, optimizer=Optimizer(lr=0.0))
    still = replace(from_run(still, source), scheduler=STEADY, train=replace(still.train, steps=1))
    run = make_run(still, "begun")
    train(run, still)
    before, after = final_weights(source), final_weights(run)
    for name in (name for name in after if name.startswith("model.")):
        average = before[f"optimizer.{name.removeprefix('model.')}.average"]
        assert torch.equal(average, after[name]), name
    preferences = [name for name in after if name.startswith("balance.")]
    for name in preferences:
        step = round(experts.balance_rate / BIAS_UNIT)
        assert (after[name] - before[name]).abs().max() <= step < before[name].abs().max()
    assert preferences


@pytest.mark.slow
@pytest.mark.parametrize("ema_decay", [exhaustive(None), 0.8])
def test_with_its_moments_it_goes_on_as_the_other_run(
    ema_decay: float | None, tmp_path: Path
) -> None:
    """Each step sees all samples, and the learning rate is constant, so only the moments matter."""
    write_tokens(tmp_path, samples=SAMPLES)
    optimizer = Optimizer(lr=1e-2, clip_norm=0.5, ema_decay=ema_decay)
    config = replace(saving_config(tmp_path, optimizer=optimizer), scheduler=STEADY)
    source = make_run(config, "source")
    train(source, config)
    there = saving_config(tmp_path, dp=2, stage=3, optimizer=optimizer)
    there = replace(there, scheduler=STEADY)
    with_moments = from_run(there, source, from_optimizer=True)
    run = make_run(with_moments, "moments")
    train(run, with_moments)
    without = replace(from_run(there, source), train=replace(there.train, steps=3))
    other = make_run(without, "weights")
    train(other, without)
    longer = replace(config, train=replace(config.train, steps=2 * SAVED_STEPS))
    train(source, longer)
    expected = [record["loss"] for record in curve(source)[SAVED_STEPS:]]
    assert [record["loss"] for record in curve(run)] == pytest.approx(expected, rel=1e-9)
    losses = [record["loss"] for record in curve(other)]
    assert losses != pytest.approx(expected[:3], rel=1e-6)
    if ema_decay is None:
        assert losses[0] == pytest.approx(expected[0], rel=1e-9)


@pytest.mark.slow
def test_at_another_length_it_resumes_without_the_other_run(tmp_path: Path) -> None:
    write_tokens(tmp_path, samples=100)
    config = saving_config(tmp_path, dp=2, stage=3)
    source = RunDirectory(tmp_path / "source")
    shutil.copytree(never_stopped(tmp_path, config).path, source.path, symlinks=True)
    second = from_run(config, source)
    second = replace(second, train=replace(second.train, seq_len=2 * SEQ_LEN))
    whole, run = make_run(second, "whole"), make_run(second, "stopped")
    train(whole, second)
    train(run, second, StopBefore(5))
    shutil.rmtree(source.path)
    train(run, second)
    assert curve(run) == curve(whole)
    assert_same_weights(run, whole)
