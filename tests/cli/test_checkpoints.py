from __future__ import annotations

import json
from pathlib import Path

import pytest

from nanoscale.checkpoint import store
from nanoscale.cli.main import run as nanoscale
from nanoscale.runs import fence
from nanoscale.runs.directory import RunDirectory, checkpoint_path
from tests.cli import Capsys
from tests.support.runs import create_run

ABOUT = {
    "consumed_samples": 40,
    "tokens": 640,
    "world_size": 2,
    "time": 1.0,
    "tensors": {"model.embed.weight": {"shape": [320, 64], "dtype": "float32"}},
}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = create_run(tmp_path, "run")
    directory.config.write_text("")
    fence.begin(directory, 1)
    for step in (5, 10):
        staging = store.staging_path(directory.workspace(1), step)
        staging.mkdir()
        (staging / "__0_0.distcp").write_bytes(b"x" * 2**20)
        sums = store.sum_files(staging.iterdir())
        store.publish(staging, {"step": step, **ABOUT}, sums)
    return directory


def test_ls(run: RunDirectory, capsys: Capsys) -> None:
    assert nanoscale(["checkpoints", "ls", str(run.path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["step-00000005", "step-00000010"]
    assert "640 tokens  1 MiB in 1 file" in lines[0]
    assert nanoscale(["checkpoints", "ls", str(run.path), "--json"]) == 0
    assert [row["step"] for row in json.loads(capsys.readouterr().out)] == [5, 10]


def test_inspect(run: RunDirectory, capsys: Capsys) -> None:
    assert nanoscale(["checkpoints", "inspect", str(run.path)]) == 0
    text = capsys.readouterr().out
    assert "step              10" in text
    assert "320 × 64" in text and "__0_0.distcp" in text
    assert nanoscale(["checkpoints", "inspect", str(run.path), "--step", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 5


def test_inspect_of_a_missing_step(run: RunDirectory, capsys: Capsys) -> None:
    assert nanoscale(["checkpoints", "inspect", str(run.path), "--step", "7"]) == 2
    assert "--step 5" in capsys.readouterr().err


def test_verify_names_the_damaged_file(run: RunDirectory, capsys: Capsys) -> None:
    assert nanoscale(["checkpoints", "verify", str(run.path)]) == 0
    assert capsys.readouterr().out.count("whole") == 2
    victim = checkpoint_path(run.checkpoints, 5) / "__0_0.distcp"
    victim.write_bytes(b"y" + victim.read_bytes()[1:])
    assert nanoscale(["checkpoints", "verify", str(run.path)]) == 1
    assert "step-00000005  damaged\n  __0_0.distcp: its checksum" in capsys.readouterr().out
    assert nanoscale(["checkpoints", "verify", str(run.path), "--step", "10"]) == 0
    assert nanoscale(["checkpoints", "verify", str(run.path), "--step", "5", "--json"]) == 1


def test_a_run_without_checkpoints(tmp_path: Path, capsys: Capsys) -> None:
    directory = create_run(tmp_path, "run")
    directory.config.write_text("")
    assert nanoscale(["checkpoints", "ls", str(directory.path)]) == 0
    assert "no checkpoints" in capsys.readouterr().out
    assert nanoscale(["checkpoints", "verify", str(directory.path)]) == 2


def test_what_a_run_set_aside_is_listed_and_verified(run: RunDirectory, capsys: Capsys) -> None:
    for stored in reversed(store.list_checkpoints(run.checkpoints)):
        aside = store.set_aside(run.workspace(1), stored)
        undo = f"to undo that: mv {aside} {stored.path}"
        assert nanoscale(["checkpoints", "ls", str(run.path)]) == 0
        said = capsys.readouterr().out
        assert f"{aside.name}  set aside as damaged" in said and undo in said
        assert nanoscale(["checkpoints", "verify", str(run.path)]) == 0
        said = capsys.readouterr().out
        assert f"{aside.name}  whole\n" in said and undo in said
    assert nanoscale(["checkpoints", "ls", str(run.path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["step"], row["set_aside"]) for row in rows] == [(5, True), (10, True)]
    victim = aside / "__0_0.distcp"
    victim.write_bytes(b"")
    assert nanoscale(["checkpoints", "verify", str(run.path), "--json"]) == 0
    assert [row["whole"] for row in json.loads(capsys.readouterr().out)] == [False, True]
