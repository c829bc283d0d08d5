"""`nanoscale runs stop`: ask a run to save and stop, wherever its launcher is."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated

import typer

from nanoscale.cli.common import options as opt
from nanoscale.cli.common.output import DONE, FAILED
from nanoscale.common import display

if TYPE_CHECKING:
    from nanoscale.launch.slurm.jobs import Job
    from nanoscale.runs.directory import RunDirectory
    from nanoscale.runs.lock import Owner


_MARGIN_S = 30.0
_LOOK_S = 0.1


def stop_run(
    run: opt.Run,
    timeout: Annotated[
        float | None,
        typer.Option(
            help="Wait this number of seconds for its end",
            show_default="launcher.stop_grace_s + 30",
        ),
    ] = None,
) -> int:
    """Save and stop a run, and wait for its end; cancel its waiting SLURM job."""
    from nanoscale.launch.slurm.jobs import job_of
    from nanoscale.runs import lock
    from nanoscale.runs.directory import RunDirectory

    directory = RunDirectory.open(run)
    owner, job = lock.owner(directory), job_of(directory)
    if owner is None and job is not None and job.waits:
        job = _leave_queue(directory, job)
        if job is None:
            return DONE
    if owner is None and (job is None or not job.is_there):
        display.show(f"{directory.name} is not running")
        return DONE
    _ask(directory, owner, job)
    return _wait(directory, owner, job, timeout)


def _leave_queue(run: RunDirectory, job: Job) -> Job | None:
    """Cancel a job that waits; return the job if it has begun meanwhile."""
    from dataclasses import replace

    from nanoscale.launch.slurm.jobs import job_of
    from nanoscale.launch.slurm.slurm import cancel
    from nanoscale.runs import events, submission

    _require_own(run, job)
    with _refused(run, job):
        cancel(job.submission, only_waiting=True)
    after = job_of(run)
    if after is not None and after.is_there:
        return after
    submission.write(run, replace(job.submission, cancelled=time.time()))
    events.append(run, "cancelled", f"{job} was removed from the queue")
    display.show(f"{job} was removed from the queue")
    return None


def _ask(run: RunDirectory, owner: Owner | None, job: Job | None) -> None:
    from nanoscale.launch.slurm.slurm import signal_batch
    from nanoscale.runs import lock

    if owner is not None and (owner.is_here or job is None or not job.is_there):
        if owner.is_here:
            _note(run)
        lock.terminate(run, owner)
        display.note(f"asked {owner} to stop")
        return
    assert job is not None
    _require_own(run, job)
    with _refused(run, job):
        _note(run)
        signal_batch(job.submission, "TERM")
    display.note(f"asked {job} to stop")


def _require_own(run: RunDirectory, job: Job) -> None:
    """Raise a UserError if slurm.json may name the job of another run, since another user wrote it."""
    import re
    import shlex

    from nanoscale.common.errors import UserError, Violation
    from nanoscale.runs.trust import is_own

    if is_own(run):
        return
    number = str(job.submission)
    cluster = job.submission.cluster
    there = [] if cluster is None else [f"--clusters={cluster}"]
    signal = [] if job.waits else ["--batch", "--signal=TERM"]
    command = shlex.join(["scancel", *there, *signal, number])
    suggestions = (command,) if re.fullmatch(r"[0-9]+(_[0-9]+)?", number) else ()
    message = f"{run.path} was not made by your own runs, and {job} may be another run's"
    raise UserError("slurm", message, [Violation("RUN", run.name, "", message, suggestions)])


def _note(run: RunDirectory) -> None:
    """Record that the next signal is the user's: the run is then stopped, not preempted."""
    from nanoscale.runs import events

    with suppress(OSError):
        events.append(
            run, events.STOP, f"`nanoscale runs stop` was typed on {socket.gethostname()}"
        )


def _wait(run: RunDirectory, owner: Owner | None, job: Job | None, timeout: float | None) -> int:
    from nanoscale.config.composing.frozen import load
    from nanoscale.launch.slurm.jobs import ASK_S, job_of
    from nanoscale.runs import lock, status

    if timeout is None:
        timeout = load(run.config).launcher.stop_grace_s + _MARGIN_S
    deadline = time.monotonic() + timeout
    asked = time.monotonic()
    while (owner is not None and lock.owner(run) == owner) or (job is not None and job.is_there):
        if time.monotonic() > deadline:
            display.note(f"{run.name} is still running after {timeout:g} s")
            return FAILED
        time.sleep(_LOOK_S)
        if job is not None and time.monotonic() - asked > ASK_S:
            job, asked = job_of(run), time.monotonic()
    display.show(f"{run.name} is {status.require(run).state}")
    return DONE


@contextmanager
def _refused(run: RunDirectory, job: Job) -> Iterator[None]:
    from nanoscale.common.errors import UserError, Violation
    from nanoscale.launch.slurm.slurm import SlurmError

    try:
        yield
    except SlurmError as error:
        message = f"{job} cannot be stopped: {error}"
        raise UserError("slurm", message, [Violation("RUN", run.name, "", message)]) from error
