"""`nanoscale replay`: the same steps are repeated bit for bit, and what differs is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nanoscale.cli.main import run as nanoscale
from nanoscale.config.composing import frozen
from nanoscale.launch.lifecycle.repetition import Replay, find_replay
from nanoscale.runs import events
from nanoscale.runs.directory import RunDirectory
from nanoscale.view.run import replay_text
from tests.support.jobs import resumed_at, run_of_bytes
from tests.support.runs import create_run

pytestmark = pytest.mark.usefixtures("forked_ranks")

WORDS = (
    "recipe=debug", "model.layers=2", "train.steps=9", "train.eval_every=4", "parallel.dp=2", "zero=stage3",
    "checkpoint.every=4", "checkpoint.keep_last=null",
)  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, forked_ranks: None) -> RunDirectory:
    root = tmp_path_factory.mktemp("runs")
    assert nanoscale(["train", *WORDS, f"run.root={root}", "run.name=first"]) == 0
    return RunDirectory.open(str(root / "first"))


def replayed(
    capsys: pytest.CaptureFixture[str], run: RunDirectory, *words: str
) -> tuple[int, dict[str, Any]]:
    code = nanoscale(["replay", str(run.path), *words, "--json"])
    output = capsys.readouterr()
    assert code < 2, output.err
    return code, json.loads(output.out)


@pytest.mark.slow
def test_the_same_layout_repeats_every_bit(
    trained: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    code, about = replayed(capsys, trained, "--steps", "6-8")
    assert (code, about["begins_after"], about["trained"]) == (0, 4, 8)
    assert [row["step"] for row in about["steps"]] == [5, 6, 7, 8]
    assert "eval_loss" in about["steps"][-1]
    assert about["differing_steps"] == []
    assert about["checkpoints"] == [{"step": 8, "differing": []}]
    replay = RunDirectory.open(about["replay"])
    assert replay.checkpoint_steps() == [4, 8] and resumed_at(replay) == [4]
    schedule = [json.loads(line)["lr"] for line in trained.metrics.read_text().splitlines()]
    again = [json.loads(line)["lr"] for line in replay.metrics.read_text().splitlines()]
    assert again == schedule[:8]
    words = ["resume", str(replay.path), "train.stop_when.last_step=null"]
    assert nanoscale([*words, "--dry-run"]) == 0  # a replay is a run: it may go further


@pytest.mark.slow
def test_what_differs_is_named(trained: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    records = [json.loads(line) for line in trained.metrics.read_text().splitlines()]
    whole = trained.metrics.read_text()
    records[1]["loss"] += 0.5
    trained.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    words = ("--steps", "1-4", "parallel.dp=1", "zero=stage0")
    try:
        code, about = replayed(capsys, trained, *words)
        assert (code, about["begins_after"], about["differing_steps"]) == (1, 0, [2])
        assert about["checkpoints"] == [{"step": 4, "differing": []}]
        assert about["tolerances"]["loss"] == 1e-5 and "parallel.dp" in about["layout"]
        assert nanoscale(["replay", str(trained.path), *words, "--tolerance", "0"]) == 1
        shown = capsys.readouterr().out
        assert "is the first that differs" in shown
        assert "tensors differ, all written by ranks 0-1\n  first    model." in shown
    finally:
        trained.metrics.write_text(whole)


def logged(run: RunDirectory, losses: dict[int, float], norm: float = 2.0) -> None:
    records = [{"step": step, "loss": loss, "grad_norm": norm} for step, loss in losses.items()]
    run.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Return a function that compares a replay of steps 1 to 9 with what a run recorded."""
    runs = [create_run(tmp_path, name) for name in ("first", "first-replay")]
    wanted = Replay(runs[0], 1, 9, None, runs[0].config)

    def compare(
        recorded: dict[int, float],
        now: dict[int, float],
        tensors: list[int],
        layout: list[str],
        repeats: bool = True,
    ) -> list[str]:
        logged(runs[0], recorded)
        logged(runs[1], now)
        rows = [{"name": "model.embed.weight", "relative": 1e-7, "ranks": [0]}]
        found = [{"step": step, "differing": rows} for step in tensors]
        monkeypatch.setattr(replay_text, "_checkpoints", lambda *_: found)
        tolerance = replay_text.tolerances(layout, False, None, repeats)
        return replay_text.sentences(
            replay_text.document(wanted, runs[1], tolerance, layout), runs[1]
        )

    return compare


def test_a_checkpoint_may_be_the_first_that_differs(compared: Callable[..., list[str]]) -> None:
    steps = dict.fromkeys(range(1, 10), 4.0)
    said = compared(steps, {**steps, 9: 4.5}, [4, 8], [])
    assert said[1] == "step 4 is the first that differs, in its checkpoint"
    assert said[2] == "step 9 is the first logged step that differs (1 of 9 logged steps do):"
    # The gradient norm is equal, and is not listed.
    assert said[3].startswith("  loss  4.0 was") and said[4].startswith("step-00000004: 1 tensor")
    said = compared(steps, {**steps, 3: 4.5}, [4], [])
    assert said[1] == "step 3 is the first that differs (1 of 9 logged steps do):"


def test_steps_that_were_not_logged_are_listed(compared: Callable[..., list[str]]) -> None:
    steps = dict.fromkeys(range(1, 10), 4.0)
    said = compared({4: 4.0, 8: 4.0}, steps, [], [])
    assert said[1] == "first did not log these steps, which are not compared: 1-3,5-7,9"
    assert said[2] == "2 logged steps of first: no loss or gradient norm differs"


def test_rounding_of_another_layout_is_no_difference(compared: Callable[..., list[str]]) -> None:
    steps = dict.fromkeys(range(1, 10), 4.0)
    said = compared(steps, {**steps, 5: 4.00002}, [], ["parallel.dp", "zero.stage"])
    assert said[1].startswith("another layout (parallel.dp and zero.stage) rounds sums")
    assert said[2] == "9 logged steps of first: no loss or gradient norm differs by more than that"
    said = compared(steps, {**steps, 5: 4.0001}, [], ["parallel.dp"])
    assert said[2].startswith("step 5 is the first that differs")
    assert set(replay_text.tolerances(["parallel.dp"], True, None).values()) == {1e-9}
    assert set(replay_text.tolerances(["parallel.dp"], False, 0.5).values()) == {0.5}


def test_kernels_of_a_gpu_need_not_repeat_bits(compared: Callable[..., list[str]]) -> None:
    steps = dict.fromkeys(range(1, 10), 4.0)
    said = compared(steps, {**steps, 5: 4.00002}, [], [], repeats=False)
    assert said[1].startswith("GPUs repeat bits only with precision.deterministic=true; relative")
    assert said[2].endswith("differs by more than that")
    assert compared(steps, {**steps, 5: 4.0001}, [], [], repeats=False)[2].startswith("step 5 is")


def test_that_nothing_was_logged_is_said_before_the_replay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of_nine_steps(tmp_path)
    logged(run, {1: 4.0})
    assert nanoscale(["replay", str(run.path), "--steps", "2-5", "--dry-run"]) == 0
    assert "logged no loss" not in capsys.readouterr().err
    logged(run, {9: 4.0})
    assert nanoscale(["replay", str(run.path), "--steps", "2-5", "--dry-run"]) == 0
    assert "first has logged no loss of steps 1 to 5: nothing is compared" in " ".join(
        capsys.readouterr().err.split()
    )


@pytest.mark.parametrize("steps", ["0-2", "3-2", "2-99", "now"])
def test_wrong_steps_are_refused(
    trained: RunDirectory, capsys: pytest.CaptureFixture[str], steps: str
) -> None:
    assert nanoscale(["replay", str(trained.path), "--steps", steps]) == 2
    advice = capsys.readouterr().err.partition("type instead: ")[2].split()
    assert nanoscale(["replay", str(trained.path), *advice, "--dry-run"]) == 0


@pytest.mark.parametrize("change", ["model.layers=3", "train.seed=3", "data.valid_fraction=0.2"])
def test_another_training_is_refused(
    trained: RunDirectory, capsys: pytest.CaptureFixture[str], change: str
) -> None:
    assert nanoscale(["replay", str(trained.path), "--steps", "2", change]) == 2
    assert change in capsys.readouterr().err


def run_of_nine_steps(folder: Path) -> RunDirectory:
    run = run_of_bytes(folder, name="first")
    config = frozen.load(run.config)
    run.config.write_text(frozen.dump(replace(config, train=replace(config.train, steps=9))))
    return run


def test_steps_are_repeated_as_they_were_configured(tmp_path: Path) -> None:
    run = run_of_nine_steps(tmp_path)
    begin = [("attempt", {"attempt": 1}), ("attempt", {"attempt": 2}), ("resumed", {"step": 5})]
    for kind, fields in begin:
        events.append(run, kind, "", **fields)
    run.attempt_config(1).write_text(run.config.read_text())
    assert find_replay(run, "4").config == run.attempt_config(1)
    assert find_replay(run, "6").config == run.config


def test_skipped_samples_are_not_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of_nine_steps(tmp_path)
    events.append(run, "rollback", "", step=3)
    assert nanoscale(["replay", str(run.path), "--steps", "5"]) == 2
    assert "went back to step 3 and skipped samples" in capsys.readouterr().err
    assert find_replay(run, "1-3").last == 3


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_loss_that_was_not_finite_is_null_in_json(
    trained: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = trained.metrics.read_text()
    records = [json.loads(line) for line in whole.splitlines()]
    records[5]["loss"] = None
    trained.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    try:
        code, about = replayed(capsys, trained, "--steps", "6")
    finally:
        trained.metrics.write_text(whole)
    assert (code, about["exit_code"], about["differing_steps"]) == (1, 1, [6])
    assert about["steps"][-1]["loss"]["difference"] is None
