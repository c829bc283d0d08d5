"""The file slurm.json: the job of a run in SLURM or another batch system."""

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import cast, get_args

from nanoscale.common.errors import UserError
from nanoscale.config.schema import BatchName
from nanoscale.runs.directory import RunDirectory, write_json
from nanoscale.runs.documents import read_record


@dataclass(frozen=True)
class Submission:
    """A job of a batch system, or one task of an array of jobs."""

    job: str
    """The number of the job, or of the array."""
    task: int | None = None
    """The task's index in the array."""
    script: str | None = None
    """The script that `nanoscale submit` wrote; null: a user's own."""
    cluster: str | None = None
    """The name of one of several clusters; null if SLURM named none."""
    time: float = field(default_factory=time.time)
    """UNIX seconds of the submission, or of its first detection."""
    cancelled: float | None = None
    """The time of our cancellation: SLURM may forget the job at once."""

    system: BatchName = "slurm"
    """The batch system, as in `launcher.name`."""
    requeues: int = 0
    """The number of times that its batch script submitted itself again."""

    def __str__(self) -> str:
        return self.job if self.task is None else f"{self.job}_{self.task}"


def write(run: RunDirectory, submission: Submission) -> None:
    write_json(run.submission, asdict(submission))


def read(run: RunDirectory) -> Submission | None:
    """Return the newest job of the run; None if it was never submitted.

    Raises:
        UserError: slurm.json is damaged.
    """
    try:
        return read_record(Submission, run.submission)
    except FileNotFoundError:
        return None


def find(run: RunDirectory) -> Submission | None:
    """Return the same, or None if slurm.json is damaged."""
    try:
        return read(run)
    except UserError:
        return None


def note(run: RunDirectory, environment: Mapping[str, str] = os.environ) -> None:
    """Record the batch job that this process is a part of, if its script passes signals on to us.

    Our scripts set NANOSCALE_BATCH. A user's own script may do more than this run.
    """
    system, _, job = environment.get("NANOSCALE_BATCH", "").rpartition(":")
    if not job or (not system and environment.get("SLURM_JOB_ID") != job):
        return
    recorded = find(run)
    script = recorded.script if recorded is not None else None
    task = None if system else environment.get("SLURM_ARRAY_TASK_ID")
    if system in get_args(BatchName):
        requeues = recorded.requeues if recorded is not None else 0
        present = Submission(
            job, script=script, system=cast("BatchName", system), requeues=requeues
        )
    elif task is None:
        present = Submission(job, script=script)
    else:
        present = Submission(environment["SLURM_ARRAY_JOB_ID"], int(task), script)
    if recorded is None or str(recorded) != str(present):
        write(run, present)
