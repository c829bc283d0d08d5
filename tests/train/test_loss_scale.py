"""fp16: an overflow on one rank is a skipped step on all, and the training continues."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoscale.backends import gradients
from nanoscale.config.schema import Backend, Checkpoint
from nanoscale.parallel import process_group
from nanoscale.runs.directory import RunDirectory
from tests.support.jobs import (
    ZBV,
    StopBefore,
    curve,
    make_config,
    make_run,
    never_stopped,
    read_metrics,
    train,
    write_tokens,
)
from tests.support.layouts import Records, record_all
from tests.support.ranks import run_ranks
from tests.support.reference import plain_loop
from tests.support.rows import exhaustive

LAYOUTS = [
    (0, {}),
    (1, {"tp": 2, "pp": 2}),
    (2, {"dp": 2}),
    exhaustive(0, ZBV),
    exhaustive(0, {"cp": 2}),
]
OVERFLOWS_AT = 4
WINDOW = 6


def make(folder: Path, stage: int, degrees: dict[str, Any], **changes: Any) -> Any:
    dp = degrees.get("dp", 1)
    return make_config(
        folder, dp=dp, stage=stage, precision="fp16", parallel=degrees, micro_batch=2, **changes
    )


def train_with_overflow(rank: int, config: Any) -> Records:
    """Train with an infinite gradient in one step, on the last rank alone."""
    world = config.world_size
    gradients.scale = _spoil(gradients.scale, world - 1 == rank)
    process_group.join(world, torch.device("cpu"), 120.0)
    return record_all(rank, config)


def _spoil(scale: Any, here: bool) -> Any:
    calls = 0

    def spoiled(grads: list[Any], factor: Any) -> None:
        nonlocal calls
        scale(grads, factor)
        if isinstance(factor, float):  # the scale's factor, not clipping's
            calls += 1
            if here and calls == OVERFLOWS_AT:
                gradients.local_tensor(grads[0]).fill_(float("inf"))

    return spoiled


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "degrees"), LAYOUTS, ids=str)
def test_one_overflow_skips_the_step_everywhere(
    tmp_path: Path, stage: int, degrees: dict[str, Any]
) -> None:
    write_tokens(tmp_path)
    config = make(tmp_path, stage, degrees)
    config = replace(config, train=replace(config.train, steps=OVERFLOWS_AT + WINDOW + 2))
    records = run_ranks(train_with_overflow, config.world_size, config)[0]
    scales = [record["loss_scale"] for record in records]
    skipped = [record["skipped_steps"] for record in records]
    assert skipped == [0] * (OVERFLOWS_AT - 1) + [1] * (len(records) - OVERFLOWS_AT + 1)
    assert scales[OVERFLOWS_AT - 1] == 512 and scales[OVERFLOWS_AT - 2] == 1024
    assert scales[OVERFLOWS_AT - 1 + WINDOW] == 1024, "six good steps later it doubles"
    losses = [record["loss"] for record in records]
    # The corpus is one batch, in another order every step: a skipped step leaves the loss unchanged.
    assert losses[OVERFLOWS_AT] == pytest.approx(losses[OVERFLOWS_AT - 1], rel=1e-6)
    assert losses[OVERFLOWS_AT - 1] != pytest.approx(losses[OVERFLOWS_AT - 2], rel=1e-4)
    exact = [row[0] for row in plain_loop("fp32")]
    assert losses[0] == pytest.approx(exact[0], rel=0.01)
    assert losses[-1] < 0.8 * losses[0], "the training continues"


@pytest.mark.slow
def test_loss_scale_survives_a_resume(tmp_path: Path) -> None:
    write_tokens(tmp_path, samples=100)
    saving = {"steps": 2 * WINDOW, "checkpoint": Checkpoint()}
    config = make(tmp_path, 0, {}, **saving)
    run = make_run(config)
    train(run, config, StopBefore(9))
    train(run, make(tmp_path, 1, {"tp": 2, "pp": 2}, **saving))
    scales = {record["step"]: record["loss_scale"] for record in read_metrics(run)}
    assert scales[5] == 1024 and scales[6] == 2048  # two windows of six, the second over the resume
    assert scales[11] == 2048 and scales[12] == 4096


@pytest.mark.slow
def test_going_from_fp32_to_fp16_begins_a_scale(tmp_path: Path) -> None:
    write_tokens(tmp_path, samples=100)
    steps = {"steps": 6}
    wide = make_config(tmp_path, precision="fp32", micro_batch=2, checkpoint=Checkpoint(), **steps)
    run: RunDirectory = make_run(wide)
    train(run, wide, StopBefore(5))
    train(run, make(tmp_path, 0, {}, **steps))
    records = read_metrics(run)
    assert len(records) == 6 and "loss_scale" not in records[3]
    assert records[4]["loss_scale"] == 1024


@pytest.mark.parametrize(
    ("backend", "stage"), [("native", 0), pytest.param("deepspeed", 3, marks=pytest.mark.slow)]
)
def test_resuming_before_the_first_update(tmp_path: Path, backend: Any, stage: int) -> None:
    """The checkpoint is of a training whose steps were all skipped."""
    write_tokens(tmp_path, samples=100)
    dp = 1 if stage == 0 else 2
    config = make(tmp_path, stage, {"dp": dp}, backend=Backend(backend), checkpoint=Checkpoint())
    config = replace(config, precision=replace(config.precision, loss_scale=2.0**32))
    whole = never_stopped(tmp_path, config)
    run = make_run(config)
    train(run, config, StopBefore(4))
    skipped = [record["skipped_steps"] for record in read_metrics(run)]
    assert skipped == list(range(1, len(skipped) + 1)), "every step was skipped"
    train(run, config)
    assert curve(run) == curve(whole)
    assert read_metrics(run)[-1]["skipped_steps"] < 20
