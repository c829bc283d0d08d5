"""A loss that jumps far above its own spread is noted, or stops the run, and older checkpoints stay."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanoscale.backends.base import StepResult
from nanoscale.backends.gradients import local_tensor
from nanoscale.checkpoint.staging import Staging
from nanoscale.checkpoint.store import BEFORE_SPIKE, list_checkpoints
from nanoscale.config.composing import frozen
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.schema import Checkpoint
from nanoscale.runs import events
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.rank_context import StopFlag
from nanoscale.train.loop import Training
from nanoscale.train.stability import Spikes, ZeroGradientError, count_zeros
from tests.support.jobs import make_config, make_run, read_metrics, train, train_rank, write_tokens
from tests.support.ranks import run_ranks
from tests.support.rows import exhaustive

JUMP = 25


def jumps(losses: list[float]) -> list[int]:
    spikes = Spikes()
    return [at for at, loss in enumerate(losses) if spikes.add(loss)]


def test_a_gradient_norm_that_stays_zero_ends_the_training() -> None:
    assert count_zeros(1, 2, 2.0, 0.0) == 2
    assert count_zeros(2, 3, 2.0, 0.5) == 0
    assert count_zeros(2, 3, 0.0, 0.0) == 0, "no token has a loss"
    with pytest.raises(ZeroGradientError, match="0 in 3 logged steps up to 7"):
        count_zeros(2, 7, 2.0, 0.0)


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.2])
def test_an_ordinary_training_has_no_jump(noise: float) -> None:
    for seed in range(20):
        dice = random.Random(seed)
        falling = [2.5 + 8.5 * math.exp(-at / 30) for at in range(1000)]
        assert jumps([loss + dice.gauss(0, noise) for loss in falling]) == []


def test_a_jump_is_reported_once_until_it_is_over() -> None:
    steady = [4.8 + 0.01 * (at % 5) for at in range(40)]
    assert jumps([*steady[:19], 813.0]) == [], "19 losses show no spread"
    assert jumps([*steady[:20], 813.0]) == [20]
    assert jumps(steady + [813.0, 5.0, 700.0] + [9.0] * 200) == [40], "it is not over"
    assert jumps([*steady, 813.0, *steady[:19], 813.0, *steady[:19], 813.0]) == [40]
    assert jumps([*steady, 813.0, *steady[:20], 813.0]) == [40, 61]


def test_checkpoints_are_kept_until_the_jump_is_over() -> None:
    spikes = Spikes()
    assert sum(bool(spikes.add(loss)) for loss in [2.0] * 30 + [50.0]) == 1
    spikes.steps = [10, 20]
    resumed = Spikes(**spikes.in_manifest()[BEFORE_SPIKE])
    assert [resumed.add(loss) for loss in [2.0] * 19] == [None] * 19
    assert resumed.in_manifest() == spikes.in_manifest()
    resumed.add(2.0)
    assert resumed.in_manifest() == {} and resumed.steps == []


def train_jumping(rank: int, path: Path) -> str:
    """Train as the job does; before step 25 every rank's head is 30 times as large. Return what happened."""
    advance, done = Training.advance, list[int]()

    def advance_after_jump(training: Training) -> StepResult:
        if training.progress.step == JUMP - 1 and not done:
            done.append(JUMP)
            engine: Any = training.engine
            head = dict(engine.parameters()).get("head.weight")
            training.checkpoints.saver.hold()  # step 24 may still be copied
            if head is not None:  # else of an earlier stage
                with torch.no_grad():
                    local_tensor(head).mul_(30)
        return advance(training)

    Training.advance = advance_after_jump  # type: ignore[method-assign]
    try:
        return train_rank(rank, path, StopFlag())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def jumping(
    folder: Path, on_spike: str, steps: int = 36, **changes: Any
) -> tuple[ResolvedConfig, RunDirectory]:
    write_tokens(folder, samples=100)
    checkpoint = Checkpoint(every=4, keep_last=2, at_end=False)
    config = make_config(folder, checkpoint=checkpoint, precision="fp32", **changes)
    settings = replace(config.train, steps=steps, on_spike=on_spike)  # type: ignore[arg-type]
    config = replace(config, train=settings)
    return config, make_run(config)


def kept(run: RunDirectory) -> list[int]:
    return [checkpoint.step for checkpoint in list_checkpoints(run.checkpoints)]


def test_a_jump_is_noted_and_the_checkpoints_before_it_stay(tmp_path: Path) -> None:
    config, run = jumping(tmp_path, "note", dp=2)
    assert run_ranks(train_jumping, 2, run.path) == ["completed"] * 2
    (event,) = [event for event in events.read(run) if event["kind"] == "spike"]
    assert "the loss jumped to " in event["message"] and "(step 25)" in event["message"]
    assert kept(run) == [20, 24, 32, 36]
    longer = replace(config, train=replace(config.train, steps=44))
    assert train(run, longer) == ["completed"] * 2
    assert kept(run) == [20, 24, 40, 44], "a resumed run keeps them, too"


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"dp": 2, "stage": 3}, id="dp"),
        exhaustive({"parallel": {"tp": 2, "pp": 2}}, name="tp pp"),
    ],
)
def test_a_jump_is_rolled_back_and_its_batches_are_skipped(
    tmp_path: Path, layout: dict[str, Any]
) -> None:
    """The steps after it equal a training on the samples after it, from the checkpoint before it."""
    config, run = jumping(tmp_path, "rollback", JUMP + 3, **layout)
    assert (
        run_ranks(train_jumping, config.world_size, run.path) == ["completed"] * config.world_size
    )
    (event,) = [event for event in events.read(run) if event["kind"] == "rollback"]
    assert (event["step"], event["spike_step"]) == (24, JUMP)
    assert event["skipped_samples"] == [24 * 8, 25 * 8] and "step-00000024" in event["message"]
    records = read_metrics(run)
    assert [record["step"] for record in records] == [*range(1, JUMP + 4)]
    assert [record["tokens"] for record in records[23:26]] == [
        24 * 8 * 16,
        26 * 8 * 16,
        27 * 8 * 16,
    ]
    manifest = list_checkpoints(run.checkpoints)[-1].manifest
    assert (manifest["step"], manifest["consumed_samples"]) == (28, 29 * 8)
    assert max(record["loss"] for record in records) < 6
    # A run to the checkpoint, which skips a step's samples by hand.
    other_folder = tmp_path / "other"
    other_folder.mkdir()
    _, other = jumping(other_folder, "note", JUMP + 3, **layout)
    assert set(run_ranks(train_skipping, config.world_size, other.path)) == {"completed"}
    for ours, theirs in zip(records, read_metrics(other), strict=True):
        assert (ours["loss"], ours["grad_norm"]) == (theirs["loss"], theirs["grad_norm"])


def test_a_rollback_keeps_the_buffer_of_asynchronous_checkpoints(tmp_path: Path) -> None:
    """A pinned buffer must not be freed, and a second one might not fit."""
    config, run = jumping(tmp_path, "rollback", JUMP + 3, dp=2)
    saving = replace(config.checkpoint, asynchronous=True)
    run.config.write_text(frozen.dump(replace(config, checkpoint=saving)))
    assert run_ranks(train_counting, 2, run.path) == [("completed", 1)] * 2
    assert kept(run) == [24, 28]


def train_counting(rank: int, path: Path) -> tuple[str, int]:
    """Return the outcome of `train_jumping` and the number of buffers for copies."""
    make, count = Staging.__init__, list[Staging]()

    def counted(staging: Staging, *args: Any) -> None:
        count.append(staging)
        make(staging, *args)

    Staging.__init__ = counted  # type: ignore[method-assign]
    return train_jumping(rank, path), len(count)


def train_skipping(rank: int, path: Path) -> str:
    """Train without a jump, and skip the samples of step 25."""
    advance = Training.advance

    def advance_after_skip(training: Training) -> StepResult:
        if training.progress.step == JUMP - 1:
            training.progress.consumed_samples += training.config.train.global_batch
        return advance(training)

    Training.advance = advance_after_skip  # type: ignore[method-assign]
    return train_rank(rank, path, StopFlag())


def test_a_rollback_without_a_checkpoint_fails(tmp_path: Path) -> None:
    config, run = jumping(tmp_path, "rollback")
    run.config.write_text(
        frozen.dump(replace(config, checkpoint=replace(config.checkpoint, every=30)))
    )
    (text,) = run_ranks(train_jumping, 1, run.path)
    assert text.startswith("LossSpikeError: ") and "no checkpoint from before it" in text


@pytest.mark.slow
def test_a_jump_stops_every_rank_on_request(tmp_path: Path) -> None:
    _, run = jumping(tmp_path, "stop", dp=2)
    texts = run_ranks(train_jumping, 2, run.path)
    assert all(text.startswith("LossSpikeError: the loss jumped to ") for text in texts), texts
    assert kept(run) == [20, 24]
    assert read_metrics(run)[-1]["step"] == JUMP


def test_a_step_without_a_counted_token_is_noted() -> None:
    notes: list[tuple[str, str]] = []
    record = {"step": 3, "loss": 0.0, "grad_norm": 0.0}
    loop: Any = SimpleNamespace(
        step_log=SimpleNamespace(gather=lambda *_: record, warn=lambda _: None),
        progress=SimpleNamespace(step=3, spikes=SimpleNamespace(add=lambda _: None)),
        learning_rate=lambda _: 0.0,
        require_finite_gradients=lambda _: None,
        note=lambda *words: notes.append(words),
        evaluator=SimpleNamespace(rising=()),
        sinks=[],
        tally=None,
        zero_norms=0,
    )
    Training.log(loop, None, False)  # type: ignore[arg-type]
    assert notes == [("zero gradient", "no token of step 3 has a loss, so its loss is 0")]
