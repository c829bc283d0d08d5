"""Optuna's proposals: kept over interruptions, and told how each trial ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nanoscale.runs.directory import RunDirectory
from nanoscale.sweep.samplers import Study
from nanoscale.sweep.space import Space, read_space
from nanoscale.sweep.sweep import Settings, Sweep, Trial

WORDS = ["optimizer.lr=tag(log,interval(1e-5,1e-1))", "optimizer.name=adamw,sgd"]


def opened(folder: Path, **changes: Any) -> tuple[Study, Sweep, Space]:
    settings = Settings(WORDS, "tpe", 12, seed=3, **changes)
    sweep, space = Sweep(folder / "s"), read_space(WORDS)
    if not sweep.path.exists():
        sweep.create(settings, [])
    return Study(sweep, space, settings), sweep, space


def trained(sweep: Sweep, trial: Trial, losses: list[float]) -> None:
    """Write the metrics of a trial's run."""
    run = RunDirectory.create(sweep.runs, trial.name)
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
    good = [t for t in trials if t is not trials[2]]
    best = min(good, key=lambda t: abs(float(t.values["optimizer.lr"]) / 1e-3 - 1))
    assert study.best() == best.name


def test_the_median_pruner_gives_up_what_is_worse_than_half(tmp_path: Path) -> None:
    study, sweep, _ = opened(tmp_path, pruner="median")
    trials: list[Trial] = []
    for number in range(5):
        trial = study.next(trials)
        assert trial is not None
        trials.append(trial)
        trained(sweep, trial, [5.0, 4.0 + number / 10, 3.0])
        assert not study.hopeless(trial)
        study.ended(trial, "completed")
    bad, good = study.next(trials), None
    assert bad is not None
    trained(sweep, bad, [5.0, 9.0])
    assert study.hopeless(bad)
    study.ended(bad, "pruned")
    good = study.next([*trials, bad])
    assert good is not None
    trained(sweep, good, [5.0, 3.0])
    assert not study.hopeless(good)
