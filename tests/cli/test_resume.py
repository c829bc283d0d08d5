"""The errors and messages of resume; test_train tests that it continues."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from nanoscale.checkpoint.store import FORMAT, render_manifest, sum_files
from nanoscale.cli.main import run as nanoscale
from nanoscale.config.composing.compose import compose
from nanoscale.config.composing.frozen import dump
from nanoscale.config.resolved import differences
from nanoscale.config.rules import Devices, check
from nanoscale.config.schema import Config, Parallel, RopeScaling, Train
from nanoscale.runs import events, fence, status
from nanoscale.runs.lock import RunLock
from tests.support.runs import create_run
from tests.support.token_files import write_indexed


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run that was prepared and never launched."""
    monkeypatch.chdir(tmp_path)
    composed = compose(["recipe=debug", "run.name=x"])
    run = create_run(tmp_path / "runs", "x")
    run.config.write_text(dump(check(composed, Devices("cpu", 2)), composed.config))
    status.write(run, status.prepared())
    return run


def save(run, step):
    """Publish a checkpoint with nothing but a file in it."""
    folder = run.checkpoint(step)
    folder.mkdir(parents=True)
    (folder / "file").write_text("tensors")
    manifest = {"format": FORMAT, "step": step, "files": sum_files([folder / "file"])}
    (folder / "manifest.json").write_text(render_manifest(manifest))


def test_a_run_that_goes_on_is_refused_with_its_owner(run, capsys):
    with RunLock(run):
        for arguments in (["x"], ["x", "--dry-run"]):
            assert nanoscale(["resume", *arguments]) == 2
            printed = capsys.readouterr()
            assert "is already running: process" in printed.err
            assert ("commands" in printed.out) is ("--dry-run" in arguments)
    assert run.last_attempt() == 0


def test_a_run_stays_where_it_is(run, capsys):
    before = run.config.read_text()
    assert nanoscale(["resume", "x", "run.name=y", "run.root=elsewhere"]) == 2
    said = capsys.readouterr().err
    assert "run.name" in said and "run.root" in said and "nanoscale train --config" in said
    assert run.config.read_text() == before


@pytest.mark.parametrize("folder_too", [False, True])
def test_a_run_whose_checkpoints_are_gone_does_not_begin_again(run, folder_too, capsys):
    events.append(run, "checkpoint", "step-00000008 saved in 5 ms", step=8)
    status.write(run, replace(status.read(run), state="completed"))
    run.metrics.write_text('{"step": 8, "loss": 1.0}\n')
    if folder_too:
        run.checkpoints.rmdir()
    before = status.read(run)
    assert nanoscale(["resume", "x", "train.steps=40"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "step-00000008 was saved and is gone" in said
    assert f"in another run: nanoscale train --config {run.config}" in said
    assert status.read(run) == before
    assert run.metrics.read_text() == '{"step": 8, "loss": 1.0}\n'


def test_a_missing_folder_of_checkpoints_is_made_again(run):
    run.checkpoints.rmdir()
    fence.begin(run, 1)
    assert run.workspace(1).is_dir()


def test_what_the_checkpoints_would_not_fit_cannot_change(run, capsys):
    """Only once there is one; before that nothing is lost by starting otherwise."""
    words = ["resume", "x", "model.ffn=256", "train.seed=1", "zero=stage2", "optimizer.lr=1e-4"]
    assert nanoscale([*words, "--dry-run"]) == 0
    save(run, 5)
    capsys.readouterr()
    assert nanoscale([*words, "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert "model.ffn=256: cannot be changed by resume" in said
    assert "train.seed=1: cannot be changed by resume" in said
    assert said.count("cannot be changed by resume") == 2
    asked = "model.ffn=256 train.seed=1 zero=stage2 optimizer.lr=1e-4"
    assert f"nanoscale train --config {run.config} {asked}" in said.replace("\n", " ")
    assert "run.from_run" not in said  # other shapes


def test_what_a_run_cannot_change_another_run_can_with_its_weights(run, capsys):
    save(run, 5)
    assert nanoscale(["resume", "x", "train.seq_len=32", "--dry-run", "--json"]) == 2
    (wrong,) = json.loads(capsys.readouterr().out)["error"]["violations"]
    other = f"nanoscale train --config {run.config} train.seq_len=32"
    assert wrong["suggestions"] == [f"{other} run.from_run=x", other]
    assert nanoscale(["resume", "x", "recipe=tiny", "--json"]) == 2
    (wrong,) = json.loads(capsys.readouterr().out)["error"]["violations"]
    assert "--config" not in wrong["message"].replace("of --config", "")


@pytest.mark.slow
def test_every_layout_is_open_to_a_run_with_checkpoints(run, capsys):
    save(run, 5)
    for words in (
        ["parallel=4d"],
        ["parallel.tp=4", "parallel.sequence_parallel=false"],
        ["parallel.pp=4", "parallel.layers_per_stage=[1,2,2,3]"],
        ["parallel.pp=2", "parallel.schedule=zbv", "train.micro_batch=1"],
        ["parallel.cp=2", "parallel.cp_method=ulysses", "zero=stage3"],
        ["parallel.activation_checkpointing=full", "precision=bf16", "backend.compile=on"],
    ):
        assert nanoscale(["resume", "x", *words, "--dry-run"]) == 0, words
    said = capsys.readouterr().err
    assert "parallel.tp: 1 → 2" in said and "parallel.schedule: 1f1b → zbv" in said
    assert "parallel.layers_per_stage: null → [1,2,2,3]" in said
    assert "parallel.virtual_stages: 1 → 2" in said


def test_another_optimizer_is_another_run(run, capsys, monkeypatch):
    monkeypatch.setattr("nanoscale.common.versions.find_spec", lambda name: name)
    words = ["resume", "x", "optimizer.name=adamw8bit", "--dry-run"]
    assert nanoscale(words) == 0
    save(run, 5)
    capsys.readouterr()
    assert nanoscale(words) == 2
    assert "optimizer.name=adamw8bit: cannot be changed by resume" in capsys.readouterr().err


def test_an_average_does_not_appear_in_a_run(run, capsys):
    words = ["resume", "x", "optimizer.ema_decay=0.9", "--dry-run"]
    assert nanoscale(words) == 0
    save(run, 5)
    capsys.readouterr()
    assert nanoscale(words) == 2
    assert "optimizer.ema_decay=0.9: cannot be changed by resume" in capsys.readouterr().err


def test_another_objective_is_another_run(run, tmp_path, capsys):
    """A number of consumed samples is one of pairs, or of sequences."""
    write_indexed(tmp_path / "pairs", [np.arange(40) % 250] * 60)
    words = ["recipe=debug", "data=megatron", "data.path=pairs", "train.objective=dpo"]
    composed = compose([*words, "run.name=x"])
    run.config.write_text(dump(check(composed, Devices("cpu", 2)), composed.config))
    words = ["resume", "x", "train.objective=orpo", "--dry-run"]
    assert nanoscale(words) == 0
    save(run, 5)
    capsys.readouterr()
    assert nanoscale(words) == 2
    assert "train.objective=orpo: cannot be changed by resume" in capsys.readouterr().err


def test_an_unknown_run_and_a_wrong_key(run, capsys):
    assert nanoscale(["resume", "xx"]) == 2
    assert "x" in capsys.readouterr().err
    assert nanoscale(["resume", "x", "train.stepz=5"]) == 2
    assert "train.steps" in capsys.readouterr().err


def test_a_dry_run_shows_what_differs_and_writes_nothing(run, capsys):
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    assert nanoscale(["resume", "x", "train.steps=30", "--dry-run", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["derived"]["steps"] == 30
    assert json.loads(printed.out)["run_dir"] == str(run.path)
    assert "train.steps: 20 → 30" in printed.err
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == before


def test_the_checkpoint_that_is_named_was_looked_at(run, capsys):
    for step in (5, 10, 15):
        save(run, step)
    (run.checkpoint(15) / "manifest.json").unlink()
    (run.checkpoint(10) / "file").write_text("tens")
    assert nanoscale(["resume", "x", "--dry-run"]) == 0
    said = capsys.readouterr().err
    assert "step-00000015 is damaged (manifest.json: missing)" in said
    assert "step-00000010 is damaged (file: 4 bytes" in said
    assert "resuming from step-00000005" in said and "from step-00000010" not in said
    (run.checkpoint(5) / "file").unlink()
    for arguments in (["x", "--dry-run"], ["x"]):
        assert nanoscale(["resume", *arguments]) == 2
        assert "no complete checkpoint is left" in capsys.readouterr().err
    assert len(run.checkpoint_steps()) == 3 and run.last_attempt() == 0


def test_a_complete_run_says_how_to_extend_it(run, capsys):
    status.write(run, status.read(run).starting(1).ending("completed", 0))
    assert nanoscale(["resume", "x"]) == 0
    assert "nanoscale resume x train.steps=40" in capsys.readouterr().out
    assert nanoscale(["resume", "x", "train.steps=5"]) == 0
    said = capsys.readouterr().out
    assert "it trained 20 steps" in said and "nanoscale resume x train.steps=40" in said
    assert nanoscale(["resume", "x", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "completed"


def test_differences_are_found_at_every_depth():
    old = Config(train=Train(steps=5))
    scaled = Config(parallel=Parallel(dp=2), train=Train(steps=6))
    assert differences(old, scaled) == {"parallel.dp": ("auto", 2), "train.steps": (5, 6)}
    stretched = replace(old, model=replace(old.model, rope_scaling=RopeScaling()))
    assert differences(old, stretched)["model.rope_scaling.factor"] == (None, 8.0)


def test_what_would_not_fit_is_not_resumed(run, capsys):
    """Overrides are refused; an unchanged run continues, whatever the prediction."""
    small = ["cluster.memory_gib=0.01", "parallel.dp=1", "train.micro_batch=8"]
    assert nanoscale(["resume", "x", *small]) == 3
    assert "does not fit" in capsys.readouterr().err
    assert run.last_attempt() == 0 and not run.plan.exists()
    assert nanoscale(["resume", "x", *small, "--dry-run", "--json"]) == 3
    shown = json.loads(capsys.readouterr().out)
    assert shown["plan"]["fits"] is False and shown["error"]["kind"] == "plan"
    assert nanoscale(["resume", "x", *small, "--dry-run", "--force"]) == 0
