"""Law 2: a run that was stopped, killed, resumed twice or resumed elsewhere is the run that never was."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nanoscale.checkpoint.store import list_checkpoints
from nanoscale.common.errors import UserError
from nanoscale.config.schema import Checkpoint, Optimizer
from nanoscale.runs import events
from nanoscale.runs.directory import RunDirectory
from tests.support import layouts
from tests.support.jobs import (
    SAVED_STEPS,
    SHAPE,
    ZBV,
    KillBefore,
    StopBefore,
    assert_same_training,
    assert_same_weights,
    curve,
    make_run,
    never_stopped,
    resumed_at,
    saving_config,
    train,
    write_tokens,
)
from tests.support.rows import exhaustive

ADAMW = Optimizer(lr=1e-2, clip_norm=0.5)
SGD = {"optimizer": Optimizer(name="sgd", lr=1e-2, clip_norm=0.5)}
LION = {"optimizer": Optimizer(name="lion", lr=1e-3, clip_norm=0.5)}
MUON = {"optimizer": Optimizer(name="muon", lr=1e-2, clip_norm=0.5)}
MOMENTS = {"optimizer": replace(ADAMW, moments_dtype="bf16")}
ADAFACTOR = Optimizer(name="adafactor", lr=1e-2, clip_norm=0.5)
SCHEDULE_FREE = {"optimizer": Optimizer(name="schedule-free", lr=1e-2, clip_norm=0.5)}
AVERAGED = {"optimizer": replace(ADAMW, ema_decay=0.8)}
HSDP = {"dp_replicate": 2}
OFFLOADED = {"zero": layouts.OFFLOADED}


@pytest.fixture(autouse=True)
def _tokens(tmp_path: Path) -> None:
    write_tokens(tmp_path, samples=100)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dp", "stage", "precision", "changes"),
    [
        (1, 0, "fp32", {}),
        exhaustive(4, 3, "fp32", HSDP),
        (1, 0, "fp32", SGD),
        exhaustive(1, 0, "fp32", LION),
        (2, 3, "fp32", MUON),
        (2, 3, "fp32", OFFLOADED | AVERAGED),
        (1, 0, "fp32", SCHEDULE_FREE),
        (2, 2, "bf16-pure", {}),
        (1, 0, "fp32", MOMENTS),
    ],
)
def test_stopped_and_resumed_bit_for_bit(
    tmp_path: Path, dp: int, stage: int, precision: str, changes: dict[str, Any]
) -> None:
    config = saving_config(tmp_path, dp=dp, stage=stage, precision=precision, **changes)
    whole = never_stopped(tmp_path, config)
    run = make_run(config)
    assert train(run, config, StopBefore(5)) == ["stopped"] * dp
    stopped_at = list_checkpoints(run.checkpoints)[-1].step
    alone = dp == 1 and changes is not OFFLOADED
    assert (
        stopped_at == len(curve(run)) == (4 if alone else 5)
    )  # a group of ranks agrees a step later
    assert train(run, config) == ["completed"] * dp
    assert curve(run) == curve(whole)
    assert_same_weights(run, whole)


@pytest.mark.slow
def test_resumed_twice_is_resumed_once(tmp_path: Path) -> None:
    config = saving_config(tmp_path, dp=2, stage=2, precision="fp32")
    run = make_run(config)
    train(run, config, StopBefore(3))
    twin = RunDirectory(run.path.with_name("twin"))
    shutil.copytree(run.path, twin.path, symlinks=True)
    train(run, config)
    train(twin, config, StopBefore(6, first=4))
    train(twin, config)
    assert curve(run) == curve(twin)
    assert_same_weights(run, twin)
    train(twin, config)  # there is nothing left to do
    assert curve(run) == curve(twin)
    assert_same_weights(run, twin)


@pytest.mark.slow
def test_killed_between_two_logged_steps(tmp_path: Path) -> None:
    """Steps after the last checkpoint are logged again, and no others."""
    config = saving_config(tmp_path, precision="fp32", checkpoint=Checkpoint(every=4))
    config = replace(config, train=replace(config.train, log_every=3))
    whole = make_run(replace(config, run=replace(config.run, root=str(tmp_path / "whole"))))
    train(whole, config)
    run = make_run(config)
    with pytest.raises(RuntimeError, match="died|failed"):
        train(run, config, KillBefore(8))
    assert [record["step"] for record in curve(run)] == [1, 3, 6]
    train(run, config)
    assert resumed_at(run) == [4]
    assert [record["step"] for record in curve(run)] == [1, 3, 6, 9]
    assert curve(run) == curve(whole)
    assert_same_weights(run, whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second", "optimizer"),
    [
        ({"dp": 4, "dp_replicate": 2, **OFFLOADED}, {"dp": 2, "stage": 0}, ADAMW),
        exhaustive({"dp": 2, **OFFLOADED}, {"dp": 4, "stage": 1}, SGD["optimizer"]),
    ],
    ids=["offloaded-hsdp-2-1-adamw", "offloaded-4-1-sgd"],
)
def test_resumed_in_other_layouts(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any], optimizer: Optimizer
) -> None:
    config = saving_config(tmp_path, optimizer=optimizer)
    whole = never_stopped(tmp_path, config)
    run = make_run(config)
    train(run, saving_config(tmp_path, optimizer=optimizer, **first), StopBefore(3))
    train(run, saving_config(tmp_path, optimizer=optimizer, **second), StopBefore(6, first=4))
    train(run, config)
    assert resumed_at(run) == [3, 6]
    stored = {c.step: c.manifest["world_size"] for c in list_checkpoints(run.checkpoints)}
    assert (stored[3], stored[6], stored[SAVED_STEPS]) == (first["dp"], second["dp"], 1)
    assert_same_training(run, whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer",
    [
        exhaustive(ADAMW, name="adamw"),
        exhaustive(MUON["optimizer"], name="muon"),
        exhaustive(SCHEDULE_FREE["optimizer"], name="schedule-free"),
        exhaustive(AVERAGED["optimizer"], name="average"),
        pytest.param(ADAFACTOR, id="adafactor"),
    ],
)
def test_resumed_along_every_axis(tmp_path: Path, optimizer: Optimizer) -> None:
    """dp 4, then tp 2 · pp 2, then cp 4, then one process: the losses of a run that stayed in one.

    In the pipeline both ends hold the tied embedding, which the checkpoint has once.
    """
    tied = replace(SHAPE, tie_embeddings=True)
    config = saving_config(tmp_path, model=tied, optimizer=optimizer)
    whole = never_stopped(tmp_path, config)
    run = make_run(config)
    stations: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"dp": 4, "stage": 3}, {}),
        ({"stage": 1}, {"tp": 2, "pp": 2}),
        ({"stage": 2}, {"cp": 4}),
    ]
    for turn, (changes, degrees) in enumerate(stations):
        there = saving_config(
            tmp_path, model=tied, parallel=degrees, optimizer=optimizer, **changes
        )
        train(run, there, StopBefore(2 * turn + 2, first=2 * turn + 1))
    train(run, config)
    assert resumed_at(run) == [2, 4, 6]
    assert_same_training(run, whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "degrees"),
    [exhaustive(0, {}), (3, {"dp": 2}), exhaustive(3, {"dp": 2, "cp": 2}), (0, ZBV)],
    ids=str,
)
def test_killed_and_resumed_bit_for_bit(
    tmp_path: Path, stage: int, degrees: dict[str, Any]
) -> None:
    config = saving_config(tmp_path, stage=stage, precision="fp32", parallel=degrees)
    whole = never_stopped(tmp_path, config)
    run = make_run(config)
    with pytest.raises(RuntimeError, match="died|failed"):
        train(run, config, KillBefore(6))
    assert list_checkpoints(run.checkpoints)[-1].step == 3
    train(run, config)
    assert resumed_at(run) == [3]
    assert curve(run) == curve(whole)
    assert_same_weights(run, whole)


@pytest.mark.slow
def test_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    config = saving_config(tmp_path, dp=2, stage=3, precision="fp32")
    whole = never_stopped(tmp_path, config)
    run = make_run(config)
    train(run, config, StopBefore(5))
    newest = list_checkpoints(run.checkpoints)[-1]
    victim = newest.path / "__1_0.distcp"
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    train(run, config)
    (fallback,) = [event for event in events.read(run) if event["kind"] == "fallback"]
    assert newest.path.name in fallback["message"] and "__1_0.distcp" in fallback["message"]
    assert resumed_at(run) == [3]
    assert curve(run) == curve(whole)
    assert_same_weights(run, whole)


def test_no_whole_checkpoint_is_an_error(tmp_path: Path) -> None:
    config = saving_config(tmp_path)
    run = make_run(config)
    train(run, config, StopBefore(4))
    (run.checkpoints / "step-00000003" / ".metadata").unlink()
    with pytest.raises(RuntimeError, match=r"no checkpoint.*\.metadata: missing"):
        train(run, config)
    assert len(curve(run)) == 3  # nothing was lost


def test_another_model_is_refused(tmp_path: Path) -> None:
    config = saving_config(tmp_path)
    run = make_run(config)
    train(run, config, StopBefore(4))
    wider = replace(config, model=replace(config.model, ffn=64))
    with pytest.raises(RuntimeError, match=UserError.__name__):
        train(run, wider)


def test_another_corpus_is_refused(tmp_path: Path) -> None:
    config = saving_config(tmp_path)
    run = make_run(config)
    train(run, config, StopBefore(4))
    write_tokens(tmp_path, samples=101)
    with pytest.raises(RuntimeError, match="trained on other tokens"):
        train(run, config)
