"""Optuna's proposals: kept over interruptions, and told how each trial ends."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest

from nanoscale.launch.fleet.signals import Signals
from nanoscale.sweep.runner import Runner, Slot
from nanoscale.sweep.samplers import Study
from nanoscale.sweep.space import Space, read_space
from nanoscale.sweep.sweep import Settings, Sweep, Trial
from tests.support.runs import create_run

WORDS = ["optimizer.lr=tag(log,interval(1e-5,1e-1))", "optimizer.name=adamw,sgd"]


def opened(folder: Path, **changes: Any) -> tuple[Study, Sweep, Space]:
    settings = Settings(
        **{
            "overrides": WORDS,
            "sampler": "tpe",
            "trials": 12,
            "seed": 3,
            "metric": "eval_loss",
            **changes,
        }
    )
    sweep, space = Sweep(folder / "s"), read_space(WORDS)
    if not sweep.path.exists():
        sweep.create(settings, [])
    return Study(sweep, space, settings), sweep, space


def trained(sweep: Sweep, trial: Trial, losses: list[float]) -> None:
    """Write the metrics of a trial's run."""
    run = create_run(sweep.runs, trial.name)
    lines = [json.dumps({"step": s, "eval_loss": loss}) for s, loss in enumerate(losses, 1)]
    run.metrics.write_text("".join(f"{line}\n" for line in lines))


@pytest.mark.slow
def test_a_study_goes_on_after_an_interruption(tmp_path: Path) -> None:
    """Trials with rates near 1e-3 are good: later proposals must be nearer to it than the first."""
    trials: list[Trial] = []
    for number in range(12):
        study, sweep, _ = opened(tmp_path)  # every time as another process
        trial = study.next(trials)
        assert trial is not None
        trials.append(trial)
        distance = abs(float(trial.values["optimizer.lr"]) / 1e-3 - 1)
        trained(sweep, trial, [9.0, distance])
        study, sweep, _ = opened(tmp_path)
        study.ended(trial, "failed" if number == 2 else "completed")
    assert study.next(trials) is None
    assert len({trial.name for trial in trials}) == 12
    assert {trial.values["optimizer.name"] for trial in trials} == {"adamw", "sgd"}
    good = [abs(float(t.values["optimizer.lr"]) / 1e-3 - 1) for t in trials if t is not trials[2]]
    assert sorted(value for _, value in recorded(sweep) if value is not None) == sorted(good)


def recorded(sweep: Sweep) -> list[tuple[str, float | None]]:
    """Return the run and the value of each of Optuna's trials."""
    study = optuna.load_study(study_name=sweep.name, storage=f"sqlite:///{sweep.storage}")
    return [(one.user_attrs["run"], one.value) for one in study.trials]


@pytest.mark.slow
def test_a_resumed_sampler_continues_its_random_sequence(tmp_path: Path) -> None:
    def proposals(folder: Path, *, resumed: bool) -> list[Trial]:
        folder.mkdir()
        study, trials = opened(folder, sampler="random")[0], list[Trial]()
        for _ in range(4):
            study = opened(folder, sampler="random")[0] if resumed else study
            trial = study.next(trials)
            assert trial is not None
            trials.append(trial)
        return trials

    resumed = proposals(tmp_path / "resumed", resumed=True)
    assert resumed == proposals(tmp_path / "whole", resumed=False)
    assert len({trial.values["optimizer.lr"] for trial in resumed}) == 4


@pytest.mark.slow
def test_interrupted_and_retried_trials_are_recorded_when_they_complete(tmp_path: Path) -> None:
    study, sweep, _ = opened(tmp_path, trials=1)
    # Its launcher refuses to start: the trial has not ended, and is started again by --resume.
    settings = Settings(["recipe=none", *WORDS], "tpe", 1)
    runner = Runner(sweep, settings, read_space(settings.overrides), study, [], [Slot()], no_table)
    with Signals() as signals:
        assert runner.run(signals)
    (interrupted,) = runner.trials
    study, *_ = opened(tmp_path)
    failed = study.next(runner.trials)
    assert failed is not None
    study.ended(failed, "failed")
    study = opened(tmp_path)[0]
    for trial, loss in ((interrupted, 2.0), (failed, 3.0)):
        trained(sweep, trial, [4.0, loss])
        study.ended(trial, "completed")
        study.ended(trial, "completed")
    assert [one for one in recorded(sweep) if one[1] is not None] == [
        (interrupted.name, 2.0),
        (failed.name, 3.0),
    ]


def no_table(trials: Sequence[Trial], *, changed: bool, stopping: bool) -> None: ...


@pytest.mark.slow
def test_the_median_pruner_gives_up_what_is_worse_than_half(tmp_path: Path) -> None:
    study, sweep, _ = opened(tmp_path, pruner="median")
    trials: list[Trial] = []
    for number in range(5):
        trial = study.next(trials)
        assert trial is not None
        trials.append(trial)
        trained(sweep, trial, [5.0, 4.0 + number / 10, 3.0])
        assert not study.should_prune(trial)
        study.ended(trial, "completed")
    bad, good = study.next(trials), None
    assert bad is not None
    trained(sweep, bad, [5.0, 9.0])
    assert study.should_prune(bad)
    study.ended(bad, "pruned")
    good = study.next([*trials, bad])
    assert good is not None
    trained(sweep, good, [5.0, 3.0])
    assert not study.should_prune(good)
