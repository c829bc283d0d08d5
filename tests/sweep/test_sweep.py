"""Sweeps as users run them, with real trainings, killed and resumed."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from nanoscale.cli.common.request import CommandLine, request_new_run
from nanoscale.cli.main import run as nanoscale
from nanoscale.launch.fleet.signals import Signals
from nanoscale.launch.lifecycle.prepare import new_run
from nanoscale.runs import events, lock, status
from nanoscale.runs.directory import RunDirectory
from nanoscale.sweep.runner import Runner, Slot
from nanoscale.sweep.space import Space
from nanoscale.sweep.sweep import Settings, Sweep, Trial
from tests.cli import Capsys
from tests.support.rows import exhaustive
from tests.support.runs import create_run
from tests.support.waiting import wait_until

WORDS = ["recipe=debug", "model.layers=1", "train.global_batch=4", "train.log_every=1"]
WORDS += ["checkpoint.every=2", "launcher.preflight=false"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def start(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    line = [sys.executable, "-m", "nanoscale", "sweep", *words]
    with (folder / "sweep.log").open("ab") as log:
        return subprocess.Popen(line, cwd=folder, stdout=log, stderr=log)


def losses(sweep: Sweep) -> dict[str, list[tuple[int, float]]]:
    """Return the logged steps and losses of each trial."""
    found = {}
    for path in sorted(sweep.runs.iterdir()):
        lines = RunDirectory(path).metrics.read_text().splitlines()
        found[path.name] = [(one["step"], one["loss"]) for one in map(json.loads, lines)]
    return found


def steps_so_far(sweep: Sweep) -> int:
    files = sweep.runs.glob("*/metrics.jsonl") if sweep.runs.exists() else []
    return sum(path.read_bytes().count(b"\n") for path in files)


def interrupted(folder: Path, words: list[str], kills: list[int], count: int) -> Sweep:
    """Run a sweep that is killed when this many steps are trained in total, and resumed each time."""
    sweep = Sweep(folder / "sweeps" / "killed")
    for kill in kills:
        process = start(folder, *words, "--name", "killed")
        wait_until(lambda kill=kill: steps_so_far(sweep) >= kill)  # type: ignore[misc]
        process.send_signal(signal.SIGKILL)
        process.wait()  # its trials may still save a checkpoint when the next process begins
    assert start(folder, "--resume", "killed").wait() == 0, (folder / "sweep.log").read_text()
    assert len(losses(sweep)) == count
    for trial in sweep.read()[1]:
        ends = [e for e in events.read(sweep.run(trial)) if e["kind"] == "end"]
        assert [e["outcome"] for e in ends].count("completed") == 1, trial.name
    return sweep


TWELVE = ["optimizer.lr=1e-3,3e-4,1e-4", "train.seed=1,2,3,4"]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("values", "kills", "count"),
    [
        pytest.param(["optimizer.lr=1e-3,3e-4"], [8], 2, marks=pytest.mark.slow),
        pytest.param(TWELVE, [1, 9, 20, 41, 60], 12, marks=pytest.mark.exhaustive),
    ],
)
def test_a_killed_sweep_runs_what_is_missing(
    values: list[str], kills: list[int], count: int, tmp_path: Path
) -> None:
    words = [*WORDS, "train.steps=6", *values]
    sweep = interrupted(tmp_path, words, kills, count)
    assert start(tmp_path, *words, "--name", "whole").wait() == 0
    assert losses(sweep) == losses(Sweep(tmp_path / "sweeps" / "whole"))
    assert (sweep.path / "results.csv").read_text().count("completed") == count


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), exhaustive(signal.SIGTERM, 75)])
def test_a_signal_stops_all_trials_and_the_sweep_says_how_to_go_on(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """A scheduler starts the command again after the exit code of SIGTERM."""
    words = [*WORDS, "train.steps=400", "optimizer.lr=1e-3,3e-4", "--at-once", "2", "--name", "s"]
    sweep = Sweep(tmp_path / "sweeps" / "s")
    process = start(tmp_path, *words)
    wait_until(lambda: len(list(sweep.runs.glob("*/metrics.jsonl"))) == 2)
    process.send_signal(number)
    assert process.wait() == code
    _, trials = sweep.read()
    assert [sweep.state(trial) for trial in trials] == ["interrupted"] * 2
    assert not any(lock.owner(sweep.run(trial)) for trial in trials)
    said = (tmp_path / "sweep.log").read_text()
    assert said.count("stopping: trials save a checkpoint") == 1
    assert said.count("to run what is missing: nanoscale sweep --resume s") == 1


@pytest.mark.slow
def test_ctrl_c_twice_kills_trials_that_do_not_stop(tmp_path: Path) -> None:
    words = [*WORDS, "train.steps=400", "train.seed=1,2", "launcher.stop_grace_s=3600"]
    sweep = Sweep(tmp_path / "sweeps" / "s")
    process = start(tmp_path, *words, "--name", "s")
    wait_until(lambda: steps_so_far(sweep) > 1)
    ranks = [it.pid for it in psutil.Process(process.pid).children(recursive=True) if is_rank(it)]
    assert len(ranks) == 1
    os.kill(ranks[0], signal.SIGSTOP)  # so that it does not save a checkpoint and end
    process.send_signal(signal.SIGINT)
    wait_until(lambda: "stopping:" in (tmp_path / "sweep.log").read_text())
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    assert not psutil.pid_exists(ranks[0])


def is_rank(process: psutil.Process) -> bool:
    return ".rank-" in Path(f"/proc/{process.pid}/fd/1").readlink().name


@pytest.mark.slow
def test_a_trial_that_still_stops_is_resumed_after_its_end(tmp_path: Path) -> None:
    """The process of the sweep was killed, and the trial saves a checkpoint."""
    words = [*WORDS, "train.steps=2", "train.seed=1"]
    sweep, trial = Sweep(tmp_path / "s"), Trial("seed=1", {})
    settings = Settings(words)
    sweep.create(settings, [trial])
    held = ExitStack()
    held.enter_context(
        new_run(
            request_new_run(CommandLine([*words, "run.name='seed=1'", f"run.root={sweep.runs}"]))
        )
    )
    shown = 0

    def show(trials: Sequence[Trial], *, changed: bool, stopping: bool) -> None:
        nonlocal shown
        shown += 1
        assert shown > 3 or not sweep.log(trial).exists()
        if shown == 3:
            held.close()

    runner = Runner(sweep, settings, Space((), ()), None, [trial], [Slot()], show)
    with Signals() as signals:
        assert runner.run(signals)
    assert sweep.state(trial) == "completed" and not runner.failed


def test_wrong_trials_are_refused_together_before_anything_is_written(
    here: Path, capsys: Capsys
) -> None:
    line = ["sweep", "recipe=debug", "parallel.tp=1,3", "train.seed=1,2"]
    assert nanoscale(line) == 2
    said = capsys.readouterr().err
    assert "2 of 4 trials cannot run" in said and "parallel.tp=2 or parallel.tp=4" in said
    for options, message in (
        (["--trials", "3"], "--trials needs --sampler"),
        (["--sampler", "tpe"], "needs --trials N"),
        (["--name", "a/b"], "must be the name of a folder"),
        (["--resume", "none"], "takes no overrides"),
    ):
        assert nanoscale(["sweep", "recipe=debug", "train.seed=1,2", *options]) == 2
        assert message in capsys.readouterr().err
    assert nanoscale(["sweep", "--resume", "none"]) == 2
    assert "is not a sweep" in capsys.readouterr().err
    assert list(here.iterdir()) == []


def test_a_dry_run_plans_every_trial_and_writes_nothing(here: Path, capsys: Capsys) -> None:
    line = ["sweep", "recipe=debug", "optimizer.lr=1e-3,3e-4", "--name", "s", "--dry-run"]
    assert nanoscale(line) == 0
    shown = capsys.readouterr()
    assert shown.out.split() == ["lr=1e-3", "lr=3e-4"]
    assert "2 trials, 1 at once; the plan expects" in shown.err
    assert list(here.iterdir()) == []


@pytest.mark.slow
def test_a_trial_whose_launcher_refuses_to_start_is_shown_as_failed(
    here: Path, capsys: Capsys
) -> None:
    sweep = Sweep(here / "sweeps" / "s")
    sweep.create(
        Settings(["recipe=debug", "train.seed=1,2"]), [Trial("seed=1", {"train.seed": "1"})]
    )
    (sweep.runs / "seed=1").mkdir()  # in the way of the run
    assert nanoscale(["sweep", "--resume", "s", "--json"]) == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out)["trials"][0]["state"] == "failed"
    assert f"seed=1 failed; its output is in {sweep.path}/logs/seed=1.log\n  error: " in shown.err
    assert "to resume trials that have failed: nanoscale sweep --resume s --retry" in shown.err


def test_resume_takes_no_other_settings_and_names_its_folder(here: Path, capsys: Capsys) -> None:
    sweep = Sweep(here / "else where" / "s")
    sweep.create(
        Settings(["recipe=debug", "train.seed=1,2"]), [Trial("seed=1", {"train.seed": "1"})]
    )
    for option, value in (
        ("--sampler", "grid"), ("--trials", "2"), ("--pruner", "none"), ("--metric", "loss"),
        ("--config-dir", "."), ("--name", "s"), ("--seed", "0"), ("--hostfile", "hosts"),
    ):  # fmt: skip
        line = ["sweep", "--resume", "s", "--root", "else where", option, value]
        assert nanoscale(line) == 2, option
        shown = "overrides" if option == "--hostfile" else option
        assert f"--resume takes no {shown}: " in capsys.readouterr().err
    assert nanoscale(["sweep", "--resume", "else where/s", "--json"]) == 2
    (violation,) = json.loads(capsys.readouterr().out)["error"]["violations"]
    assert violation["key"] == "--resume"
    assert nanoscale(["sweep", *shlex.split(violation["suggestions"][0]), "--dry-run"]) == 0
    capsys.readouterr()
    words = ["recipe=debug", "train.seed=3,4", "--name", "s", "--root", "else where", "--json"]
    assert nanoscale(["sweep", *words]) == 2
    assert nanoscale([*advised(capsys)[1:], "--dry-run"]) == 0


def test_the_plan_counts_the_trials_that_are_left(here: Path, capsys: Capsys) -> None:
    sweep = Sweep(here / "sweeps" / "s")
    trials = [Trial(f"seed={seed}", {"train.seed": seed}) for seed in "12"]
    sweep.create(
        Settings(["recipe=debug", "train.seed=interval(1,9)"], "random", 5, metric="loss"), trials
    )
    run = create_run(sweep.runs, "seed=1")
    status.write(run, status.prepared().starting(1).ending("completed", 0))
    assert nanoscale(["sweep", "--resume", "s", "--dry-run"]) == 0
    assert "for 4 of them" in capsys.readouterr().err
    words = ["recipe=debug", "train.seed=1,2", "launcher.device=cpu", "--slurm", "--dry-run"]
    assert nanoscale(["sweep", *words, "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["at_once"] is None
    assert "at once" not in shown.err and "each, 2 of them, " in shown.err


def test_another_sweep_does_not_take_the_name_of_one(here: Path, capsys: Capsys) -> None:
    sweep = Sweep(here / "sweeps" / "s")
    sweep.create(Settings(["train.seed=1,2"]), [])
    assert nanoscale(["sweep", "recipe=debug", "train.seed=3,4", "--name", "s"]) == 2
    assert "nanoscale sweep --resume s" in capsys.readouterr().err
    with (
        sweep.held(),
        pytest.raises(Exception, match="another process runs the sweep"),
        sweep.held(),
    ):
        pass


@pytest.mark.parametrize(
    "wrong", ["optimizer.lr=interval(1e-4,1e-3)", "train.seed=1,1", "run.tags=a,b"]
)
def test_advice_on_values_is_accepted(wrong: str, here: Path, capsys: Capsys) -> None:
    others = ["recipe=debug", "zero.stage=0,1"]
    assert nanoscale(["sweep", *others, wrong, "--json"]) == 2
    (violation,) = json.loads(capsys.readouterr().out)["error"]["violations"]
    for text in violation["suggestions"]:
        advice = shlex.split(text)
        kept = [*others, wrong] if advice[0].startswith("--") else others
        assert nanoscale(["sweep", *kept, *advice, "--dry-run"]) == 0


def test_advice_on_sweeps_is_accepted(here: Path, capsys: Capsys) -> None:
    assert nanoscale(["sweep", "recipe=debug", "train.steps=4", "--json"]) == 2
    assert nanoscale([*advised(capsys)[1:], "--dry-run"]) == 0
    words = ["recipe=debug", "train.seed=1,2"]
    Sweep(here / "sweeps" / "s").create(Settings(words), [Trial("seed=1", {"train.seed": "1"})])
    capsys.readouterr()
    assert (
        nanoscale(
            ["sweep", *words, "--name", "s", "--sampler", "random", "--trials", "2", "--json"]
        )
        == 2
    )
    assert nanoscale([*advised(capsys)[1:], "--dry-run"]) == 0
    capsys.readouterr()
    assert nanoscale(["sweep", "--resume", "t", "--json"]) == 2
    assert nanoscale(["sweep", *advised(capsys), "--dry-run"]) == 0


def test_a_metric_that_no_trial_logs_is_refused(here: Path, capsys: Capsys) -> None:
    """A sampler would learn nothing from its trials; without evaluations it minimizes the loss."""
    sampled = ["recipe=debug", "train.seed=interval(1,9)", "--sampler", "tpe", "--trials", "3"]
    for words, said, advice in (
        ([*sampled, "--metric", "eval_loss"], "never measured", "train.eval_every=2"),
        ([*sampled, "--metric", "eval_los"], "unknown metric", "--metric eval_loss"),
        (
            ["recipe=debug", "train.seed=1,2", "--metric", "losss"],
            "unknown metric",
            "--metric loss",
        ),
    ):
        capsys.readouterr()
        assert nanoscale(["sweep", *words, "--json"]) == 2
        (violation,) = json.loads(capsys.readouterr().out)["error"]["violations"]
        assert said in violation["message"]
        assert advice in violation["suggestions"]
    evaluated = ["--metric", "eval_loss", "train.eval_every=2"]
    for words, said in ((["--metric", "loss"], ""), (evaluated, ""), ([], "the training loss")):
        capsys.readouterr()
        assert nanoscale(["sweep", *sampled, *words, "--dry-run"]) == 0
        assert said in capsys.readouterr().err


def advised(capsys: Capsys) -> list[str]:
    (violation,) = json.loads(capsys.readouterr().out)["error"]["violations"]
    return shlex.split(violation["suggestions"][0])


def test_what_is_wrong_with_an_array_writes_nothing(tmp_path, monkeypatch, capsys):
    """Trials that ask SLURM for different things, a sampler, and a machine without sbatch."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    base = ["sweep", "recipe=debug", "launcher.device=cpu", "--name", "queued", "--slurm"]
    for words, said in (
        (["train.seed=1,2"], "sbatch is not installed here"),
        (["train.seed=1,1"], "one value twice"),
        (["train.seed=1,2", "--sampler", "random", "--trials", "2"], "remove --sampler random"),
        (["train.seed=1,2", "launcher=ssh"], "launcher=slurm"),
    ):
        assert nanoscale([*base, *words]) == 2, words
        seen = capsys.readouterr()
        assert said in seen.err and "Traceback" not in seen.err, (words, seen.err)
    assert nanoscale(["sweep", "--resume", "queued", "--slurm"]) == 2
    assert "takes no --slurm" in capsys.readouterr().err
    assert nanoscale([*base, "train.seed=1,2", "--dry-run"]) == 0
    assert list(tmp_path.iterdir()) == []
