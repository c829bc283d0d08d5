"""The whole path with real ranks, and everything that can be refused before it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from nanoscale.cli.main import run as nanoscale
from nanoscale.launch.lifecycle.attempt import Attempt
from nanoscale.runs import status
from nanoscale.runs.directory import RunDirectory, read_json
from tests.support.forked_jobs import forked_jobs
from tests.support.rows import exhaustive
from tests.support.runs import create_run
from tests.support.token_files import write_indexed

STEPS = 4


def write_tokens(folder):
    write_indexed(folder / "tokens", [np.arange(64 * 16 * 8 + 1) % 250])


def words(folder, *more):
    return [
        "recipe=debug",
        "data.source=megatron",
        f"data.path={folder / 'tokens'}",
        "data.valid_fraction=0",
        "launcher.threads=1",
        f"run.root={folder / 'runs'}",
        f"train.steps={STEPS}",
        *more,
    ]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write_tokens(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two ranks that was trained from the command line, and its output."""
    folder = tmp_path_factory.mktemp("trained")
    write_tokens(folder)
    arguments = ["train", *words(folder, "parallel.dp=2", "run.name=first"), "--json"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-m", "nanoscale", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return folder, done


def test_one_command_trains(trained):
    folder, done = trained
    document = json.loads(done.stdout)
    run = RunDirectory(Path(document["run_dir"]))
    assert run.path == folder / "runs" / "first"
    assert (document["status"], document["exit_code"], document["steps"]) == ("completed", 0, STEPS)
    assert document["metrics"]["tokens"] == STEPS * 8 * 64
    before, _, after = done.stderr.partition("training from step 1\n")
    assert len([line for line in before.splitlines() if not line.startswith("warning: ")]) == 4
    assert after.startswith(f"step 1/{STEPS} ") and f"step {STEPS}/{STEPS}" in after
    assert after.partition("\nnext:\n")[2].splitlines() == [
        "  nanoscale generate first --prompt 'Once'",
        "  nanoscale eval first",
        "  nanoscale checkpoints export first --format hf",
        "  nanoscale resume first train.steps=8",
    ]
    assert status.read(run).state == "completed"
    assert run.checkpoint_steps() == [STEPS]


def test_the_run_directory_is_complete(trained):
    run = RunDirectory(trained[0] / "runs" / "first")
    launch = read_json(run.launch)
    assert launch["hosts"][0]["ranks"] == [0, 1]
    assert launch["hosts"][0]["command"][-2:] == ["-m", "nanoscale.agent"]
    provenance = read_json(run.provenance)
    assert provenance["parallel.dp"]["source"] == "command line"
    assert provenance["optimizer.lr"]["overrode"][-1]["source"] == "default"
    environment = read_json(run.environment)
    assert environment["packages"]["torch"] and environment["cores"] >= 1
    version = torch.backends.cudnn.version()  # None in a build for CPUs
    assert environment["kernels"] == {"attention": "flash", "flash": None, "cudnn": version}
    logs = sorted(path.name.partition(".")[2] for path in run.attempt_logs(1).iterdir())
    expected = [f"rank-{rank}.{stream}" for rank in (0, 1) for stream in ("err", "out")]
    assert logs == expected  # no agent has said anything
    kinds = [json.loads(line)["kind"] for line in run.events.read_text().splitlines()]
    assert [kind for kind in kinds if kind != "note"] == ["attempt", "running", "checkpoint", "end"]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_a_run_goes_on_in_another_layout(trained, capsys):
    run = RunDirectory(trained[0] / "runs" / "first")
    first = run.config.read_text()
    assert nanoscale(["resume", str(run.path), "train.steps=6", "parallel.dp=1"]) == 0
    printed = capsys.readouterr()
    assert "train.steps: 4 → 6" in printed.err and "parallel.dp: 2 → 1" in printed.err
    assert "resuming from step-00000004" in printed.err
    assert "resumed from step-00000004" in printed.out
    records = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert run.attempt_config(1).read_text() == first
    assert (status.read(run).attempt, status.read(run).state) == (2, "completed")
    before = run.config.stat()
    assert nanoscale(["resume", str(run.path)]) == 0
    assert "trained 6 steps" in capsys.readouterr().out
    assert run.config.stat() == before and run.last_attempt() == 2


@pytest.mark.slow
def test_deepspeed_trains_with_the_same_command_and_keeps_its_noise_to_itself(folder, capsys):
    command = ["train", *words(folder, "parallel.dp=2", "run.name=other", "backend=deepspeed")]
    assert nanoscale([*command, "zero=stage2"]) == 0
    out, err = capsys.readouterr()
    assert "completed after 4 steps" in out
    screen = [line for line in (out + err).splitlines() if "DeepSpeed" in line or "WARN" in line]
    assert not screen
    run = RunDirectory(folder / "runs" / "other")
    assert read_json(run.deepspeed)["zero_optimization"]["stage"] == 2
    with forked_jobs():
        assert nanoscale(["resume", str(run.path), "backend=native", "train.steps=6"]) == 0
    assert "resumed from step-00000004" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_a_failure_within_deepspeed_is_one_diagnosis(folder, capsys):
    command = ["train", *words(folder, "run.name=broken", "backend=deepspeed", "zero=stage1")]
    assert nanoscale([*command, "optimizer.lr=1e30", "train.steps=6"]) == 1
    _, err = capsys.readouterr()
    assert "is nan" in err or "is inf" in err
    failure = read_json(RunDirectory(folder / "runs" / "broken").failure)
    assert "NonFiniteError" in failure["traceback"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extra", "message"),
    [
        exhaustive("backend.extra.zero_optimisation.x=1", "zero_optimization"),
        exhaustive(
            "backend.extra={zero_optimization: {round: 1}}", "Extra inputs are not permitted"
        ),
        (
            "backend.extra={zero_optimization: {compute_grad_norm: false}}",
            ": compute_grad_norm=false is supported only",
        ),
    ],
)
def test_extra_settings_are_judged_by_deepspeed_before_the_launch(folder, capsys, extra, message):
    command = ["train", *words(folder, "run.name=extra", "backend=deepspeed", "--dry-run")]
    assert nanoscale([*command, extra]) == 2
    assert message in capsys.readouterr().err
    assert not (folder / "runs").exists()


def test_a_dry_run_shows_all_and_writes_nothing(folder, capsys):
    before = sorted(folder.rglob("*"))
    layout = ["parallel.dp=4", "train.micro_batch=1", "run.name=x"]
    assert nanoscale(["train", *words(folder, *layout), "--dry-run", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["world_size"] == 4
    (host,) = document["hosts"]
    assert (host["slots"], host["ranks"]) == (4, [0, 1, 2, 3])
    assert host["command"][0] == sys.executable
    assert document["derived"] == {
        "dp": 4,
        "global_batch": 8,
        "micro_batch": 1,
        "accumulation": 2,
        "tokens_per_step": 512,
        "steps": STEPS,
        "parameters": document["derived"]["parameters"],
    }
    assert document["derived"]["parameters"] > 100_000
    assert document["master_addr"] == "127.0.0.1" and 0 < document["master_port"] < 65536
    assert document["run_dir"] == str(folder / "runs" / "x")
    assert nanoscale(["train", *words(folder, *layout), "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "dp 4" in text and "stage 0: nothing is sharded" in text
    assert "OMP_NUM_THREADS=1" in text and "-m nanoscale.agent" in text
    assert str(folder / "runs" / "x") in text
    assert sorted(folder.rglob("*")) == before


def test_a_dry_run_shows_the_mesh_and_what_matters(folder, capsys):
    more = ["parallel=4d", "parallel.schedule=zbv", "parallel.dp_replicate=2", "zero=stage3"]
    asked = ["train", *words(folder, *more, "precision=fp16", "run.name=x"), "--dry-run"]
    assert nanoscale([*asked, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["world_size"] == 16
    assert document["mesh"]["axes"] == {"pp": 2, "dp": 2, "cp": 2, "tp": 2}
    place = document["mesh"]["ranks"][11]
    assert [place[axis] for axis in ("rank", "pp", "dp", "cp", "tp")] == [11, 1, 0, 1, 1]
    settings = document["settings"]
    assert settings["data"] == f"megatron {folder / 'tokens'}, tokens by byte, 25% of an epoch"
    assert settings["device"] == "cpu, 1 thread a rank"
    assert "products fp16" in settings["precision"] and "65536" in settings["precision"]
    assert "stage 3" in settings["zero"]
    assert settings["pipeline"] == "zbv, 4 stages of 2 blocks"
    assert settings["copies"] == "2, each sharded over 2 ranks"
    assert nanoscale(asked) == 0
    text = capsys.readouterr().out
    assert "pp 2 × dp 2 × cp 2 × tp 2" in text and "zbv, 4 stages of 2 blocks" in text


def test_names_are_found_and_repeated_runs_get_a_new_one(folder, capsys):
    def planned(*arguments):
        assert nanoscale(["train", *arguments, "--dry-run", "--json"]) == 0
        return Path(json.loads(capsys.readouterr().out)["run_dir"]).name

    assert planned(*words(folder)).startswith("debug-20")
    run = create_run(folder / "runs", "x")
    from nanoscale.config.composing.compose import compose
    from nanoscale.config.composing.frozen import dump

    run.config.write_text(dump(compose(words(folder, "run.name=x", "train.micro_batch=8")).config))
    assert planned("--config", str(run.config)) == "x-2"
    assert planned("--config", str(run.config), "run.name=y") == "y"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run.name=taken"], "nanoscale resume"),
        (["run.root=file"], "not a directory"),
        (["run.name=../x"], "run.name"),
        (["recipe=debugg"], "debug"),
        (["train.stepz=3"], "train.steps"),
        (["parallel.tp=3"], "parallel.tp"),
        (
            ["parallel.pp=3", "parallel.layers_per_stage=[3,3]"],
            "'parallel.layers_per_stage=[3,3,2]'",
        ),
        (["train.global_batch=7", "parallel.dp=2"], "train.global_batch"),
        (["data.path=nowhere"], "data.path"),
    ],
)
def test_a_wrong_request_is_one_error_and_nothing_is_written(folder, capsys, arguments, said):
    create_run(folder / "runs", "taken").config.touch()
    (folder / "file").write_text("")
    before = sorted(folder.rglob("*"))
    assert nanoscale(["train", *words(folder), *arguments]) == 2
    printed = capsys.readouterr()
    assert said in printed.err and "Traceback" not in printed.err
    assert printed.out == ""
    assert sorted(folder.rglob("*")) == before


def test_a_wrong_request_as_json(folder, capsys):
    assert nanoscale(["train", *words(folder, "train.stepz=3"), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["kind"] == "config"


def test_nothing_is_left_where_the_launch_itself_breaks(folder, monkeypatch, capsys):
    def broken(*_):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(Attempt, "execute", broken)
    assert nanoscale(["train", *words(folder, "run.name=x")]) == 1
    assert "Too many open files" in capsys.readouterr().err
    assert status.read(RunDirectory(folder / "runs" / "x")).state == "failed"


def test_a_disk_without_room_for_a_checkpoint_is_refused(folder, capsys, monkeypatch):
    usage = shutil.disk_usage(folder)._replace(free=2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert nanoscale(["train", *words(folder)]) == 3
    assert "a checkpoint takes 3.86 MiB, and 1 MiB are free" in capsys.readouterr().err
    assert not (folder / "runs").exists()
    assert nanoscale(["train", *words(folder), "--dry-run", "--json"]) == 3
    saving = json.loads(capsys.readouterr().out)["checkpoints"]
    assert (saving["every_minutes"], saving["keep_last"], saving["most_at_once"]) == (15, 2, 1)
    assert saving["needed_bytes"] == saving["bytes"] > saving["free_bytes"] == 2**20
    assert "checkpoints will fill the disk" in saving["warnings"][0]
