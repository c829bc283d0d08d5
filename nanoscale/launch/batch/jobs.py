"""The jobs of runs in batch systems, as far as they are known here."""

import shlex
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nanoscale.common.errors import UserError, Violation
from nanoscale.common.units import clock
from nanoscale.launch.batch.system import BatchError, BatchSystem, JobState
from nanoscale.launch.batch.systems import SYSTEMS
from nanoscale.runs import lock, status, submission
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.submission import Submission

ASK_S = 2.0
"""Seconds between two queries to a batch system, which serves many users."""

_UNSETTLED = ("prepared", "starting", "running", "preempted")
"""States in which the batch system may know more about a run than its directory."""

_ENDS = {
    "CANCELLED": "cancelled",
    "NODE_FAIL": "its node failed",
    "OUT_OF_MEMORY": "out of memory",
    "PREEMPTED": "preempted",
    "TIMEOUT": "out of time",
}
"""End states, in words."""


@dataclass(frozen=True)
class Job:
    """The job of a run, and its state in the batch system."""

    submission: Submission
    state: JobState | None
    """None if the batch system no longer knows it, or could not be asked."""
    problem: str = ""
    """The reason why the batch system could not be asked."""

    def __str__(self) -> str:
        return f"job {self.submission}"

    @property
    def system(self) -> BatchSystem:
        return SYSTEMS[self.submission.system]

    @property
    def waits(self) -> bool:
        return self.state is not None and self.state.waits

    @property
    def is_there(self) -> bool:
        """True if it waits or runs."""
        return self.state is not None and not self.state.ended

    @property
    def end(self) -> str:
        """Its end, in words."""
        if self.submission.cancelled is not None:
            return "cancelled"
        if self.state is None:
            return "gone"
        return _ENDS.get(self.state.state, self.state.state.lower())

    def sentence(self) -> str:
        """Return all that is known of it, in one line."""
        if self.problem:
            return f"{self}: {self.system.title} cannot be asked here: {self.problem}"
        if self.state is None and self.submission.cancelled is not None:
            return f"{self}: removed from the queue at {clock(self.submission.cancelled)}"
        if self.state is None:
            return f"{self}: {self.system.title} no longer knows it"
        state = self.state
        words = [f"{self}: {state.state}"]
        if state.reason:
            words[-1] += f" ({state.reason})"
        if state.waits:
            words.append(f"queued since {clock(self.submission.time)}")
            if state.start is not None:
                words.append(f"expected to start at {state.start}")
        elif state.nodes:
            words.append(f"on {state.nodes} since {state.start}")
        if state.restarts:
            words.append(f"queued again {state.restarts}×")
        return ", ".join(words)

    def document(self) -> dict[str, Any]:
        """Return the document for `--json`."""
        state = None if self.state is None else asdict(self.state)
        about = asdict(self.submission) | {"job": str(self.submission)}
        return about | {"slurm": state, "problem": self.problem or None}


def output_of(run: RunDirectory, one: Submission) -> Path | None:
    """Return the log of a job's batch script; None if it was not written by `nanoscale submit`."""
    if one.script is None:
        return None
    folder = run.logs if one.task is None else Path(one.script).parent
    return folder / f"{one.system}-{one}.out"


def way_on(run: RunDirectory) -> str:
    """Return the command that continues an ended run, where it was launched: here, or by a batch system."""
    one = submission.find(run)
    verb = ["resume"] if one is None or one.script is None else ["submit", "--resume"]
    return shlex.join(["nanoscale", *verb, run.reference])


def job_of(run: RunDirectory, previous: Job | None = None) -> Job | None:
    """Return the newest job of a run; None if it was never submitted.

    Args:
        previous: the previous answer, which is returned if the batch system cannot be asked.
    """
    one = submission.read(run)
    job = None if one is None else _ask([one])[str(one)]
    return previous if previous is not None and job is not None and job.problem else job


def require_inactive(run: RunDirectory) -> None:
    """Raise a UserError if a launcher holds the run, or its job waits or runs, or may do so."""
    lock.refuse_if_held(run)
    job = job_of(run)
    require_known(run, job)
    if job is not None and job.is_there:
        stop = shlex.join(["nanoscale", "runs", "stop", run.reference])
        raise _active(run, f"{job} waits in {job.system.title}'s queue or runs", stop)


def require_known(run: RunDirectory, job: Job | None) -> None:
    """Raise a UserError if a batch system could not be asked that may know more about a run."""
    if job is None or not job.problem or job.submission.cancelled is not None:
        return
    if status.read(run).state in _UNSETTLED:
        raise _active(run, job.sentence())


def _active(run: RunDirectory, what: str, *suggestions: str) -> UserError:
    violation = Violation("RUN", run.name, "command line", what, suggestions)
    return UserError("run", f"the run {run.name!r} may still be active: {what}", [violation])


def jobs_of(runs: Iterable[RunDirectory]) -> dict[RunDirectory, Job]:
    """Return the jobs of the runs that have one. Each batch system is asked once, about jobs that may run."""
    handed = {run: one for run in runs if (one := submission.find(run)) is not None}
    may_run = []  # it has not ended since the job was submitted
    for run, one in handed.items():
        now = status.read(run)
        if now.state in _UNSETTLED or now.ended is None or now.ended < one.time:
            may_run.append(one)
    jobs = _ask(may_run)
    return {run: jobs.get(str(one), Job(one, None)) for run, one in handed.items()}


def _ask(handed: Sequence[Submission]) -> dict[str, Job]:
    jobs: dict[str, Job] = {}
    for system in {one.system for one in handed}:
        of_system = [one for one in handed if one.system == system]
        try:
            states, problem = SYSTEMS[system].states(of_system), ""
        except BatchError as error:
            states, problem = {}, str(error)
        jobs |= {str(one): Job(one, states.get(str(one)), problem) for one in of_system}
    return jobs


def in_words(state: str, in_progress: bool, job: Job | None) -> str:
    """Return the state of a run in words: a launcher that was killed, or never began, could not record it."""
    if job is not None and job.waits:  # more certain than a launcher on a lost host
        return f"queued ({job})"
    if in_progress:
        return state
    if state in ("starting", "running"):
        if job is not None and job.state is not None and job.state.ended:
            return f"{state}, then {job.end} ({job})"
        return f"{state}, then lost"
    if state == "prepared" and job is not None and not job.problem:
        return f"starting ({job})" if job.is_there else f"never began ({job}: {job.end})"
    return state


def batch_logs(run: RunDirectory) -> list[Path]:
    """List the log of the batch script of the run's job."""
    one = submission.read(run)
    path = output_of(run, one) if one is not None else None
    return [path] if path is not None and path.exists() else []


class Activity:
    """A test whether a run is active, or waits in a queue."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._asked = float("-inf")
        self._job: Job | None = None

    def __call__(self) -> bool:
        if lock.owner(self._run) is not None:
            self._asked = float("-inf")
            return True
        if time.monotonic() - self._asked > ASK_S:
            self._job, self._asked = job_of(self._run, self._job), time.monotonic()
        return self._job is not None and self._job.is_there
