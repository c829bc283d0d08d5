"""The output of a run: its ranks' logs, and its course as `train` shows it."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from nanoscale.cli.common import options as opt
from nanoscale.cli.common.output import DONE, FAILED, INTERRUPTED, answer, print_json
from nanoscale.common import display
from nanoscale.common.errors import UserError, Violation
from nanoscale.runs import status
from nanoscale.runs.directory import RunDirectory, no_follow, read_json
from nanoscale.runs.tail import LineTail

if TYPE_CHECKING:
    from nanoscale.launch.batch.jobs import Job
    from nanoscale.launch.lifecycle.attempt import Outcome
    from nanoscale.runs.lock import Owner
    from nanoscale.view.run.live import LiveView


_LOOK_S = 0.1
_ANSWER_S = 15.0


def watch_run(run: opt.Run, as_json: opt.AsJson = False) -> int:
    """Follow a run until it ends, also while it waits in a batch system's queue.

    Ctrl-C ends the watching, not the run. The exit code is the run's.
    """
    from nanoscale.view.run.live import LiveView
    from nanoscale.view.run.outcome_text import document, print_lost, print_outcome

    directory = RunDirectory.open(run)
    stream = sys.stderr if as_json else sys.stdout
    try:
        with LiveView(directory, stream) as view:
            job = _follow(directory, view)
    except KeyboardInterrupt:
        display.note(
            f"{directory.name} continues; to stop it: nanoscale runs stop {shlex.quote(directory.reference)}"
        )
        return INTERRUPTED
    outcome = _outcome(directory)
    if outcome is None:
        print_lost(directory, job, stream)
        return FAILED
    print_outcome(directory, outcome, stream)
    if as_json:
        print_json(document(directory, outcome))
    return outcome.exit_code


def _follow(run: RunDirectory, view: LiveView) -> Job | None:
    """Show the run's events until nobody works on it; return the state of its job."""
    from nanoscale.launch.batch.jobs import ASK_S, job_of
    from nanoscale.runs import lock

    reported, job = "", None
    while True:
        owner = lock.owner(run)
        if owner is not None:
            _follow_launcher(run, owner, view)
            reported = ""
            continue
        job = job_of(run, job)
        if job is None or not job.is_there:
            return job
        has_run = status.read(run).state in status.ENDED
        if job.sentence() != reported and (job.waits or not has_run):
            reported = job.sentence()
            view.line(reported)
        deadline = time.monotonic() + ASK_S
        while lock.owner(run) is None and time.monotonic() < deadline:
            time.sleep(_LOOK_S)


def _follow_launcher(run: RunDirectory, owner: Owner, view: LiveView) -> None:
    """Show a launcher's events until it releases the run."""
    from nanoscale.config.composing.frozen import load
    from nanoscale.launch.lifecycle.command import read_plan
    from nanoscale.runs import lock

    shown = 0
    while lock.owner(run) == owner:
        now = status.read(run)
        plan = read_plan(run) if now.state in ("starting", "running") else None
        if plan is not None and plan.attempt == now.attempt != shown:  # not between two attempts
            shown = plan.attempt
            view.join(plan, load(run.config).train.steps)
        if shown:
            view.poll()
        time.sleep(_LOOK_S)
    view.poll()


def _outcome(run: RunDirectory) -> Outcome | None:
    """Return how the run ended; None if its launcher could not record it."""
    from nanoscale.launch.lifecycle.attempt import Outcome
    from nanoscale.runs import failure

    now = status.require(run)
    if now.state not in status.ENDED or now.exit_code is None:
        return None
    cause = failure.read(run) if now.state == "failed" else None
    return Outcome(now.state, now.exit_code, cause)


def explain_run(run: opt.Run, as_json: opt.AsJson = False) -> int:
    """Show where each rank of a running job is, and for which ranks the others wait.

    The exit code is 1 if the job's launcher does not answer.
    """
    from nanoscale.launch.lifecycle.command import read_plan
    from nanoscale.runs import lock
    from nanoscale.runs.position import Position, explained

    directory = RunDirectory.open(run)
    plan = read_plan(directory)
    if lock.owner(directory) is None or plan is None:
        what = "is not running"
        command = shlex.join(["nanoscale", "runs", "show", directory.reference])
        violation = Violation("RUN", directory.name, "command line", what, (command,))
        raise UserError("run", f"{directory.name} {what}", [violation])
    directory.positions.unlink(missing_ok=True)
    os.close(no_follow(directory.question, os.O_WRONLY | os.O_CREAT))
    deadline = time.monotonic() + _ANSWER_S
    while not directory.positions.exists():
        if time.monotonic() > deadline or lock.owner(directory) is None:
            display.note(f"the launcher of {directory.name} did not answer")
            return FAILED
        time.sleep(_LOOK_S)
    positions = read_json(directory.positions)
    hosts = {rank: host.host for host in plan.hosts for rank in host.ranks}
    known = {int(rank): Position(**position) for rank, position in positions.items()}
    answer(as_json, positions, lambda _: display.show(explained(known, hosts)))
    return DONE


def show_logs(
    run: opt.Run,
    rank: int | None = opt.option("Print only this rank"),
    attempt: int | None = opt.option("Print this attempt", shown="the last"),
    stream: Literal["out", "err"] | None = opt.option("Print only this stream", shown="both"),
    batch: bool = opt.flag("Print the output of the batch script of its SLURM job", "--batch"),
    follow: bool = opt.flag("Continue until the run ends", "--follow", "-f"),
) -> None:
    """Print the output of the ranks, each line with its host and rank."""
    from nanoscale.launch.batch.jobs import Activity, batch_logs

    directory = RunDirectory.open(run)
    is_active: Callable[[], bool] = Activity(directory) if follow else lambda: False
    tails: dict[Path, LineTail] = {}
    more = True
    while more:
        more = is_active()
        files = batch_logs(directory) if batch else directory.log_files(attempt, rank, stream)
        for path in files:
            _print_lines(path, tails.setdefault(path, LineTail(path)), last=not more)
        if more:
            time.sleep(_LOOK_S)
    if not tails:
        _refuse_logs(directory, attempt, rank, batch)


def _print_lines(path: Path, tail: LineTail, last: bool) -> None:
    """Print what is new in a file, each line with its host and rank."""
    host, ranks, rank = path.stem.rpartition(".rank-")
    prefix = f"{host}:{rank} │ ".encode() if ranks else b""
    for lines in tail.batches():
        display.content(b"".join(prefix + line.rstrip() + b"\n" for line in lines))
    if last and (rest := tail.take_remainder()):
        display.content(prefix + rest.rstrip() + b"\n")


def _refuse_logs(run: RunDirectory, attempt: int | None, rank: int | None, batch: bool) -> None:
    from nanoscale.launch.batch.jobs import batch_logs

    have = [path.name.removeprefix("attempt-") for path in sorted(run.logs.glob("attempt-*"))]
    message = f"{run.name} has no such log; its attempts: {', '.join(have) or 'none'}"
    wanted = f"attempt {run.last_attempt() if attempt is None else attempt}"
    wanted += "" if rank is None else f", rank {rank}"
    what = "output of a batch script" if batch else wanted
    command = shlex.join(["nanoscale", "runs", "logs", run.reference, "--batch"])
    other = (command,) if not batch and batch_logs(run) else ()
    violation = Violation("logs", what, "command line", "does not exist", other)
    raise UserError("run", message, [violation])
