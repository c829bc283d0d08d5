"""Disk space for the checkpoints of all trials of a sweep."""

from __future__ import annotations

import json
import re
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nanoscale.cli.main import run as nanoscale
from nanoscale.config.schema import Checkpoint
from nanoscale.plan.saving import SavingPlan
from nanoscale.runs import status
from nanoscale.sweep.disk import fits
from nanoscale.sweep.sweep import Settings, Sweep, Trial
from tests.cli import Capsys
from tests.support.runs import create_run

MIB = 2**20
LINE = ["recipe=debug", "launcher.device=cpu", "train.seed=1,2,3", "checkpoint.every=1"]
"""Three trials of 20 steps. A checkpoint takes 3.86 MiB."""
Usage = namedtuple("Usage", "total used free")


def free(monkeypatch: pytest.MonkeyPatch, mib: int) -> None:
    """Let disks have as many MiB free, apart from one that is mounted at `FOLDER`."""

    def usage(path: object) -> Usage:
        size = 900 if "FOLDER" in str(path) else mib
        return Usage(1000 * MIB, (1000 - size) * MIB, size * MIB)

    monkeypatch.setattr(shutil, "disk_usage", usage)


def refused(capsys: Capsys, *line: str) -> dict[str, Any]:
    capsys.readouterr()
    assert nanoscale(["sweep", *line, "--json"]) == 3
    error: dict[str, Any] = json.loads(capsys.readouterr().out)["error"]
    return error


@pytest.mark.slow
def test_a_sweep_whose_checkpoints_fill_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    """Each of three trials keeps two, and the last one writes a third before it deletes."""
    monkeypatch.chdir(tmp_path)
    free(monkeypatch, 20)
    error = refused(capsys, *LINE)
    assert "the checkpoints of 3 trials take 27 MiB, and 20 MiB are free in" in error["message"]
    (violation,) = error["violations"]
    assert violation["suggestions"] == [
        "checkpoint.keep_last=1"
    ]  # checkpoint=none would leave checkpoint.every=1
    assert list(tmp_path.iterdir()) == []
    Path("FOLDER").mkdir()
    root = re.findall(r"(--root) (FOLDER)", violation["remedy"])[0]
    (force,) = re.findall(r"Continue with (--force)", error["message"])
    for advice in (["checkpoint.keep_last=1"], root, [force]):
        assert nanoscale(["sweep", *LINE, *advice, "--dry-run"]) == 0, advice
    free(monkeypatch, 10)
    (violation,) = refused(capsys, *LINE[:3])["violations"]
    assert violation["suggestions"] == ["checkpoint=none"]
    assert nanoscale(["sweep", *LINE[:3], "checkpoint=none", "--dry-run"]) == 0
    free(monkeypatch, 28)
    assert nanoscale(["sweep", *LINE, "--dry-run"]) == 0


def test_only_trials_that_have_not_ended_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    sweep = Sweep(tmp_path / "sweeps" / "s")
    sweep.create(Settings(LINE), [Trial(f"seed={seed}", {"train.seed": seed}) for seed in "123"])
    free(monkeypatch, 12)
    error = refused(capsys, "--resume", "s")
    assert "3 trials" in error["message"]
    (violation,) = error["violations"]
    assert (violation["suggestions"], violation["remedy"]) == ([], "free some space")
    for seed in "12":
        run = create_run(sweep.runs, f"seed={seed}")
        status.write(run, status.prepared().starting(1).ending("completed", 0))
    assert nanoscale(["sweep", "--resume", "s", "--dry-run"]) == 0


def test_the_need_by_what_is_kept_and_written() -> None:
    saving = SavingPlan(
        config=Checkpoint(every=10, every_minutes=0, keep_last=1),
        restarts=0, steps=100, evaluations=0, minutes_in_steps=None, bytes=1, root="/", free=7,
    )  # fmt: skip
    assert fits([saving] * 5, 5, 2) and not fits([saving] * 5, 5, 3)
    assert fits([saving], 5, 2) and not fits([saving], 5, None)
    everything = replace(saving, config=replace(saving.config, keep_last=None))
    assert not fits([everything], 1, 1)
    begun = replace(everything, present=4)  # of 11
    assert fits([begun], 1, 1) and not fits([begun] * 2, 2, 1)
    nothing = Checkpoint(every_minutes=0, at_end=False, at_stop=False)
    assert fits([replace(saving, config=nothing, bytes=100)], 5, 1)
    assert fits([replace(saving, free=None)], 100, 1) and fits([], 5, 1)
