"""Asking a run to save and stop, wherever its launcher is."""

import re
import shlex
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from nanoscale.common.errors import UserError, Violation
from nanoscale.launch.batch.jobs import ASK_S, Job, job_of, require_known
from nanoscale.launch.batch.system import BatchError, query
from nanoscale.runs import events, lock, submission
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.lock import Owner
from nanoscale.runs.trust import is_own

_LOOK_S = 0.1


def leave_queue(run: RunDirectory, job: Job) -> Job | None:
    """Cancel a job that waits; return the job if it has begun meanwhile.

    Raises:
        UserError: the job may be another run's, the batch system refuses, or it cannot be asked whether the
            job has begun.
    """
    _require_own(run, job)
    with _refused(run, job):
        query(job.system.cancel(job.submission))
    after = job_of(run)
    require_known(run, after)
    if after is not None and after.is_there:
        return after
    submission.write(run, replace(job.submission, cancelled=time.time()))
    events.append(run, "cancelled", f"{job} was removed from the queue")
    return None


def active(owner: Owner | None, job: Job | None) -> Owner | Job | None:
    """Return the launcher or the job that can be asked to stop a run; None if it is not active."""
    present = job if job is not None and job.is_there else None
    return owner if owner is not None and owner.is_here else present or owner


def ask_to_stop(run: RunDirectory, target: Owner | Job) -> None:
    """Ask the launcher or the job of a run to save and stop.

    Raises:
        UserError: the launcher is on another host, the job may be another run's, or the batch system refuses.
    """
    if isinstance(target, Owner):
        if target.is_here:
            _note(run)
        lock.terminate(run, target)
        return
    _require_own(run, target)
    with _refused(run, target):
        _note(run)
        query(target.system.signal(target.submission, "TERM"))


def wait_for_end(run: RunDirectory, owner: Owner | None, job: Job | None, timeout: float) -> bool:
    """Wait until neither the launcher nor the job works on a run; return False after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    asked = time.monotonic()
    while (owner is not None and lock.owner(run) == owner) or (job is not None and job.is_there):
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_S)
        if job is not None and time.monotonic() - asked > ASK_S:
            job, asked = job_of(run, job), time.monotonic()
    return True


def _require_own(run: RunDirectory, job: Job) -> None:
    """Raise a UserError if slurm.json may name the job of another run, since another user wrote it."""
    if is_own(run):
        return
    system, one = job.system, job.submission
    command = system.cancel(one) if job.waits else system.signal(one, "TERM")
    is_number = re.fullmatch(r"[0-9]+(_[0-9]+|\.[A-Za-z0-9.-]+)?", str(one))
    suggestions = (shlex.join(command),) if is_number else ()
    message = f"{run.path} was not made by your own runs, and {job} may be another run's"
    raise UserError(system.name, message, [Violation("RUN", run.name, "", message, suggestions)])


def _note(run: RunDirectory) -> None:
    """Record that the next signal is the user's: the run is then stopped, not preempted."""
    with suppress(OSError):
        message = f"`nanoscale runs stop` was typed on {socket.gethostname()}"
        events.append(run, events.STOP, message)


@contextmanager
def _refused(run: RunDirectory, job: Job) -> Iterator[None]:
    try:
        yield
    except BatchError as error:
        message = f"{job} cannot be stopped: {error}"
        violation = Violation("RUN", run.name, "", message)
        raise UserError(job.system.name, message, [violation]) from error
