"""The trials of a sweep as an array of SLURM jobs: submitted together, and followed from their directories."""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from nanoscale.launch.batch.jobs import ASK_S, jobs_of
from nanoscale.launch.batch.system import BatchError
from nanoscale.launch.batch.systems import SYSTEMS
from nanoscale.launch.fleet.signals import Signals
from nanoscale.launch.request import Request
from nanoscale.launch.submission.batch_job import BatchJob, refused
from nanoscale.runs import submission
from nanoscale.runs.directory import ARRAY
from nanoscale.runs.submission import Submission
from nanoscale.sweep.sweep import State, Sweep, Trial, free_name

Show = Callable[[Sequence[State]], None]
"""A function that shows the states of all trials."""


def states(sweep: Sweep, trials: Sequence[Trial]) -> list[State]:
    """Return the state of every trial; trials that wait or run in SLURM are queued or running.

    Raises:
        BatchError: SLURM cannot be asked here.
    """
    runs = [sweep.run(trial) for trial in trials]
    jobs = jobs_of(runs)
    for job in jobs.values():
        if job.problem:
            raise BatchError(job.problem)
    states: list[State] = []
    for trial, run in zip(trials, runs, strict=True):
        state, is_there = sweep.state(trial), run in jobs and jobs[run].is_there
        states.append("queued" if is_there and state != "running" else state)
    return states


def missing(trials: Sequence[Trial], states: Sequence[State], *, retry: bool) -> list[Trial]:
    """Return the trials that have not ended and are not in SLURM; with `retry`, failed ones too."""
    wanted = ("waiting", "interrupted", *(("failed",) if retry else ()))
    return [trial for trial, state in zip(trials, states, strict=True) if state in wanted]


def submit(
    sweep: Sweep, trials: Iterable[Trial], requests: Sequence[Request], at_once: int | None
) -> list[Submission]:
    """Submit trials. A trial that has a run directory uses the script that it was submitted with.

    Args:
        requests: the requests of the trials without a run directory, in the same order.
        at_once: the number of trials that run at the same time.

    Raises:
        UserError: SLURM refused, or is not installed here.
    """
    scripts: dict[str, dict[int | None, Trial]] = {}
    for trial in trials:
        job = submission.read(sweep.run(trial)) if sweep.run(trial).config.exists() else None
        if job is not None and job.script is not None:
            scripts.setdefault(job.script, {})[job.task] = trial
    jobs = []
    for script, tasks in scripts.items():
        numbers = [task for task in tasks if task is not None]
        try:
            job = SYSTEMS["slurm"].submit(Path(script), numbers, at_once)
        except BatchError as error:
            raise refused(error, SYSTEMS["slurm"]) from error
        for task, trial in tasks.items():
            submission.write(sweep.run(trial), replace(job, task=task))
        jobs.append(job)
    if requests:
        names = {folder.name.removesuffix(ARRAY) for folder in sweep.runs.glob(f"*{ARRAY}")}
        batch = BatchJob(free_name(sweep.name, names), requests, at_once)
        batch.check()
        batch.require_one_script()
        jobs.append(batch.submit())
    return jobs


def follow(sweep: Sweep, trials: Sequence[Trial], signals: Signals, show: Show) -> bool:
    """Show the trials until none is in SLURM any more; False if a signal came before."""
    while signals.first is None:
        with suppress(BatchError):  # a controller that is busy or restarts
            present = states(sweep, trials)
            show(present)
            if not any(state in ("queued", "running") for state in present):
                return True
        until = time.monotonic() + ASK_S
        while signals.first is None and time.monotonic() < until:
            time.sleep(0.1)
    return False
