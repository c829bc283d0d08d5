"""Jobs while SLURM does not answer: an error of squeue is not the end of a job."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nanoscale.cli.main import run as nanoscale
from nanoscale.common.devices import Devices
from nanoscale.common.errors import UserError
from nanoscale.config.composing.frozen import dump, load
from nanoscale.config.rules import check
from nanoscale.launch.batch import jobs
from nanoscale.launch.batch.jobs import Activity, job_of
from nanoscale.launch.lifecycle import stopping
from nanoscale.runs import status, submission
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.submission import Submission
from nanoscale.runs.trust import executed, sign
from tests.support.recipes import changed
from tests.support.runs import create_run

LIMIT_S = 120


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A submitted run, beside a squeue that answers with the lines of `answers`, one a call."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for module in (jobs, stopping):
        monkeypatch.setattr(module, "ASK_S", -1.0)
    for name, text in {
        "squeue": "read -r state < answers && sed -i 1d answers\n"
        '[ "$state" = fails ] && exit 1\necho "12|$state|None|node|N/A|0|"',
        "scancel": "true",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    composed = changed()
    made = create_run(Path("runs"), "x")
    made.config.write_text(dump(check(composed, Devices("cpu", 2)), composed.config))
    status.write(made, status.prepared())
    submission.write(made, Submission("12"))
    sign(made.path, executed(load(made.config)))
    return made


def answers(*states: str) -> None:
    Path("answers").write_text("".join(f"{state}\n" for state in states))


def test_the_end_of_a_job_is_awaited_until_slurm_knows_it(run: RunDirectory) -> None:
    answers("RUNNING", "fails", "fails", "COMPLETED")
    assert stopping.wait_for_end(run, None, job_of(run), LIMIT_S)
    assert Path("answers").read_text() == ""


def test_a_run_is_active_as_long_as_slurm_says_nothing_else(run: RunDirectory) -> None:
    answers("RUNNING", "fails", "COMPLETED")
    is_active = Activity(run)
    assert [is_active() for _ in range(3)] == [True, True, False]


def test_a_run_whose_job_is_unknown_is_not_said_to_have_ended(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    answers("fails")
    assert nanoscale(["runs", "stop", "x"]) == 2
    assert "may still be active: job 12: SLURM cannot be asked here" in capsys.readouterr().err


def test_a_job_that_may_have_begun_is_not_recorded_as_cancelled(run: RunDirectory) -> None:
    answers("PENDING", "fails")
    job = job_of(run)
    assert job is not None and job.waits
    with pytest.raises(UserError, match="may still be active"):
        stopping.leave_queue(run, job)
    recorded = submission.read(run)
    assert recorded is not None and recorded.cancelled is None
