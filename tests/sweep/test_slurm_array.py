"""The states of trials in SLURM's queue."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from nanoscale.launch.batch.system import BatchError, JobState
from nanoscale.launch.batch.systems import SYSTEMS
from nanoscale.runs import status, submission
from nanoscale.runs.submission import Submission
from nanoscale.sweep import slurm_array
from nanoscale.sweep.sweep import Settings, Sweep, Trial
from tests.support.runs import create_run

TRIALS = [Trial(state, {}) for state in get_args(status.State)]


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    """A sweep with a trial in each state; all have been submitted, and none runs."""
    sweep = Sweep(tmp_path / "s")
    sweep.create(Settings(["train.seed=1,2"], slurm=True), TRIALS)
    for task, state in enumerate(get_args(status.State)):
        run = create_run(sweep.runs, state)
        ended = 100.0 if state in status.ENDED else None
        status.write(run, replace(status.prepared(), state=state, ended=ended))
        submission.write(run, Submission("7", task, time=50.0))
    return sweep


def waiting(submissions: list[Submission]) -> dict[str, JobState]:
    """Return the states of jobs that all wait in SLURM's queue."""
    return {str(one): JobState(str(one), "PENDING", "Priority", "", None, 0) for one in submissions}


def test_trials_that_were_submitted_again_are_queued(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SYSTEMS["slurm"], "states", waiting)
    queued, ended = ["queued"] * 3, ["completed", "failed", "interrupted", "queued"]
    assert slurm_array.states(sweep, TRIALS) == [*queued, *ended]
    for name in ("failed", "stopped"):
        submission.write(sweep.run(Trial(name, {})), Submission("8", time=200.0))
    assert slurm_array.states(sweep, TRIALS) == [*queued, "completed", *["queued"] * 3]


def test_a_controller_that_does_not_answer_is_an_error(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_answer(submissions: list[Submission]) -> dict[str, JobState]:
        raise BatchError("no controller")

    monkeypatch.setattr(SYSTEMS["slurm"], "states", no_answer)
    with pytest.raises(BatchError, match="no controller"):
        slurm_array.states(sweep, TRIALS)
