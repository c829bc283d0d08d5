"""The devices of trials that run at the same time: on this machine's GPUs, and on the hosts of a hostfile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nanoscale.cli.common.request import CommandLine, request_job, request_new_run
from nanoscale.cli.main import run as nanoscale
from nanoscale.common.devices import Devices
from nanoscale.launch.lifecycle.prepare import new_run
from nanoscale.sweep.runner import Slot, slots_of
from nanoscale.sweep.sweep import Settings, Sweep, Trial
from tests.cli import Capsys

GPUS = Devices("cuda", 8, ("NVIDIA H200",) * 8)
TRIALS = [Trial(f"seed={seed}", {"train.seed": str(seed)}) for seed in (1, 2)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanoscale.launch.request.detect", lambda: GPUS)


def begin(sweep: Sweep, trial: Trial, *overrides: str) -> None:
    """Make the run directory of a trial that was interrupted before its first step."""
    own = [f"train.seed={trial.values['train.seed']}", f"run.root={sweep.runs}"]
    own.append(f"run.name='{trial.name}'")
    with new_run(request_new_run(CommandLine([*overrides, *own]))):
        pass


def planned(capsys: Capsys, *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    assert nanoscale(["sweep", *arguments, "--dry-run", "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


@pytest.mark.usefixtures("gpus")
def test_interrupted_trials_get_gpus_of_their_own(folder: Path, capsys: Capsys) -> None:
    words = ["recipe=debug", "parallel.tp=4", "parallel.dp=1", "train.seed=1,2"]
    sweep = Sweep(folder / "sweeps" / "s")
    sweep.create(Settings(words), TRIALS)
    assert planned(capsys, "--resume", "s")["at_once"] == 2
    for trial in TRIALS:
        begin(sweep, trial, *words[:3])
    assert planned(capsys, "--resume", "s")["at_once"] == 2
    assert nanoscale(["sweep", "--resume", "s", "--at-once", "4"]) == 2
    assert "--at-once 4: 8 GPUs have room for 2 trials of 4 ranks" in capsys.readouterr().err


@pytest.mark.usefixtures("gpus")
def test_an_interrupted_trial_counts_when_new_ones_need_fewer_gpus(
    folder: Path, capsys: Capsys
) -> None:
    words = ["recipe=debug", "parallel.dp=8,1"]
    sweep = Sweep(folder / "sweeps" / "s")
    trials = [Trial(f"dp={dp}", {"parallel.dp": dp, "train.seed": "1"}) for dp in ("8", "1")]
    sweep.create(Settings(words), trials)
    begin(sweep, trials[0], "recipe=debug", "parallel.dp=8")
    assert planned(capsys, "--resume", "s")["at_once"] == 1


def slots(lines: list[str], *overrides: str, at_once: int | None = None) -> list[Slot]:
    """Return the slots of a trial on the hosts with these lines."""
    Path("hosts").write_text("".join(f"{line}\n" for line in lines))
    words = ["recipe=debug", "launcher.device=cpu", "train.global_batch=48"]
    words += ["launcher.hostfile=hosts", *overrides]
    request = request_job(CommandLine(words))
    return slots_of([request], request.composed, at_once, ["train.seed"])


FOUR = [f"n{number} slots=2" for number in (1, 2, 3, 4)]


@pytest.mark.parametrize(
    ("lines", "overrides", "includes"),
    [
        (FOUR, [], [None]),
        (FOUR, ["launcher.nodes=3"], [None]),
        (FOUR, ["launcher.nodes=1"], ["n1", "n2", "n3", "n4"]),
        (FOUR, ["launcher.nodes=2"], ["n1@n2", "n3@n4"]),
        (FOUR, ["launcher.nodes=1", "launcher.exclude=n2"], ["n1", "n3", "n4"]),
        (FOUR, ["launcher.nodes=1", "launcher.include='n3:0@n4:1'"], ["n3:0", "n4:1"]),
        (
            ["me@n1 slots=4", "fe80::1 slots=5"],
            ["launcher.nodes=1", "launcher.devices=2"],
            ["n1:0,1", "[fe80::1]:0,1", "n1:2,3", "[fe80::1]:2,3"],
        ),
        (["n1 slots=2", "n2 slots=4"], ["launcher.nodes=1"], ["n1", "n2:0,1", "n2:2,3"]),
    ],
)
def test_trials_that_need_fewer_hosts_have_hosts_of_their_own(
    lines: list[str], overrides: list[str], includes: list[str | None]
) -> None:
    assert [slot.include for slot in slots(lines, *overrides)] == includes


def test_more_trials_at_once_than_hosts_are_refused() -> None:
    with pytest.raises(Exception, match="/hosts have room for 2 trials of 4 ranks"):
        slots(FOUR, "launcher.nodes=2", at_once=3)
    assert len(slots(FOUR, "launcher.nodes=1", at_once=3)) == 3
