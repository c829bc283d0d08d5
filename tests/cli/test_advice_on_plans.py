"""Overrides that a plan, a full disk and a calibration advise; for what does not fit, see test_plan.py."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from nanoscale.cli.main import run as nanoscale
from nanoscale.common.devices import Devices
from nanoscale.config.composing.frozen import dump
from nanoscale.config.rules import check
from nanoscale.runs import status
from nanoscale.runs.directory import RunDirectory, write_json
from tests.cli import Capsys
from tests.support.recipes import changed
from tests.support.runs import create_run

MIB = 2**20
TRAIN = ["train", "recipe=debug", "launcher.device=cpu", "model.hidden=128", "--dry-run"]
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refused(capsys: Capsys, *words: str, code: int = 2) -> dict[str, Any]:
    capsys.readouterr()
    assert nanoscale([*words, "--json"]) == code
    error: dict[str, Any] = json.loads(capsys.readouterr().out)["error"]
    return error


@pytest.mark.parametrize("verb", ["train", "submit"])
def test_a_disk_without_room_for_a_checkpoint(
    verb: str, capsys: Capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The disk is full but for 5 MiB, apart from one that is mounted at `FOLDER`."""

    def usage(path: object) -> Usage:
        free = 900 if "FOLDER" in str(path) else 5
        return Usage(1000 * MIB, (1000 - free) * MIB, free * MIB)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    Path("FOLDER").mkdir()
    words = [verb, *TRAIN[1:]]
    error = refused(capsys, *words, code=3)
    (wrong,) = error["violations"]
    assert wrong["suggestions"] == ["run.root=FOLDER", "checkpoint=none"]
    (force,) = re.findall(r"Continue with (--force)", error["message"])
    for text in (*wrong["suggestions"], force):
        assert nanoscale([*words, text]) == 0, text


@pytest.mark.slow
def test_a_machine_that_is_not_known_from_here_is_named(capsys: Capsys) -> None:
    submit = ["submit", "recipe=debug", "--num-gpus", "1", "--dry-run"]
    assert nanoscale(submit) == 0
    words = set(re.findall(r"cluster=[\w-]+", capsys.readouterr().err))
    assert {"cluster=h100-sxm", "cluster=v100"} <= words
    for word in words:
        assert nanoscale([*submit, word]) == 0
        assert "not planned" not in capsys.readouterr().err, word


def test_a_machine_in_no_table_is_described_by_the_keys_that_are_named(capsys: Capsys) -> None:
    plan = ["plan", "recipe=debug", "parallel.dp=1", "cluster.device=mine"]
    message = refused(capsys, *plan)["message"]
    keys = re.findall(r"cluster\.\w+", message)
    described = [*plan, *(f"{key}=64" for key in keys)]
    message = refused(capsys, *described)["message"]
    (peak,) = re.findall(r"Type (cluster\.peaks\.bf16)=TFLOP/s$", message)
    assert nanoscale([*described, f"{peak}=100"]) == 0
    message = refused(capsys, *described, "cluster.peaks.fp32=50")["message"]
    (word,) = re.findall(r"Type (precision=fp32) or cluster", message)
    assert nanoscale([*described, "cluster.peaks.fp32=50", word]) == 0
    message = refused(capsys, *plan)["message"]
    taken = next(word for word in re.findall(r"cluster=[\w-]+", message))
    assert nanoscale([*plan[:3], taken]) == 0


def test_a_run_on_gpus_that_no_table_has_is_calibrated_with_the_cluster_named(
    capsys: Capsys,
) -> None:
    _trained_on(create_run(Path("runs"), "old"), "Strange 9000")
    calibrate = ["plan", "--calibrate", "old"]
    (wrong,) = refused(capsys, *calibrate)["violations"]
    (word,) = re.findall(r"type (cluster=\w+)", wrong["message"])
    assert nanoscale([*calibrate, word.replace("NAME", "h100-sxm")]) == 0, capsys.readouterr().err
    usage = refused(capsys, "plan", "--calibrate", "train.steps=3")["message"]
    (line,) = re.findall(r"type nanoscale (.*)", usage)
    assert shlex.split(line) == ["plan", "--calibrate", "RUN", "…"]
    only = refused(capsys, *calibrate, "train.steps=3")["message"]
    (word,) = re.findall(r"as in (cluster=[\w-]+)", only)
    assert nanoscale([*calibrate, word]) == 0


def _trained_on(run: RunDirectory, gpu: str) -> None:
    """Write the files of a run that took 60 steps on such a GPU."""
    config = check(changed("launcher.device=cuda"), Devices("cuda", 1, (gpu,)))
    run.config.write_text(dump(config))
    status.write(run, status.prepared())
    write_json(run.environment, {"gpus": [gpu]})
    rows = [{"step": step, "step_time_s": 1.0} for step in range(1, 61)]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
