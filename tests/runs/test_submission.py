from __future__ import annotations

from pathlib import Path

import pytest

from nanoscale.common.errors import UserError
from nanoscale.runs import submission
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.submission import Submission
from tests.support.runs import create_run

OURS = {"SLURM_JOB_ID": "12", "NANOSCALE_BATCH": "12"}
TASK = {
    "SLURM_JOB_ID": "15",
    "NANOSCALE_BATCH": "15",
    "SLURM_ARRAY_JOB_ID": "12",
    "SLURM_ARRAY_TASK_ID": "3",
}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return create_run(tmp_path, "x")


def test_what_is_written_is_read(run: RunDirectory) -> None:
    assert submission.read(run) is None
    job = Submission("12", 3, "/a/script", "north", cancelled=1.5)
    submission.write(run, job)
    assert submission.read(run) == job
    run.submission.write_text("{")
    assert submission.find(run) is None
    with pytest.raises(UserError, match=r"slurm.json is not JSON"):
        submission.read(run)


def test_a_job_and_a_task_are_called_as_slurm_does() -> None:
    assert (str(Submission("12")), str(Submission("12", 0))) == ("12", "12_0")


@pytest.mark.parametrize(("environment", "name"), [(OURS, "12"), (TASK, "12_3")])
def test_a_run_notes_the_job_that_it_is_launched_in(
    run: RunDirectory, environment: dict[str, str], name: str
) -> None:
    submission.note(run, environment)
    assert str(submission.read(run)) == name


def test_the_job_that_was_handed_in_is_left_as_it_is(run: RunDirectory) -> None:
    job = Submission("12", script="/a/script", time=5.0)
    submission.write(run, job)
    submission.note(run, OURS)
    assert submission.read(run) == job


def test_a_script_that_was_handed_in_again_is_another_job(run: RunDirectory) -> None:
    submission.write(run, Submission("9", 3, "/a/script"))
    submission.note(run, TASK)
    noted = submission.read(run)
    assert noted is not None and (str(noted), noted.script) == ("12_3", "/a/script")


@pytest.mark.parametrize(
    "environment", [{}, {"SLURM_JOB_ID": "12"}, {"SLURM_JOB_ID": "13", "NANOSCALE_BATCH": "12"}]
)
def test_a_job_that_passes_no_signals_on_is_none_of_ours(
    run: RunDirectory, environment: dict[str, str]
) -> None:
    submission.note(run, environment)
    assert submission.read(run) is None
