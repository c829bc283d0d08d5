"""`nanoscale runs`: look at runs and stop them, from their directories alone."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from nanoscale.cli.common import options as opt
from nanoscale.cli.common.output import print_json
from nanoscale.cli.inspect.compare_runs import compare_runs
from nanoscale.cli.inspect.list_runs import list_runs
from nanoscale.cli.inspect.remove import remove_runs
from nanoscale.cli.inspect.report import report_run
from nanoscale.cli.inspect.watch import watch_run
from nanoscale.cli.jobs.stop import stop_run
from nanoscale.common import display

if TYPE_CHECKING:
    from nanoscale.runs.directory import RunDirectory

app = typer.Typer(no_args_is_help=True, help="List, show, follow, report, stop and delete runs.")
app.command("ls")(list_runs)
app.command("compare")(compare_runs)
app.command("rm")(remove_runs)
app.command("stop")(stop_run)
app.command("watch")(watch_run)
app.command("report")(report_run)

_LOOK_S = 0.1


@app.command("show")
def show_run(run: opt.Run, as_json: opt.AsJson = False) -> None:
    """Show the state of a run, its figures and its events."""
    from nanoscale.config.composing.frozen import load
    from nanoscale.launch.slurm.jobs import job_of
    from nanoscale.runs.directory import RunDirectory
    from nanoscale.view.run.run_table import document, print_run

    directory = RunDirectory.open(run)
    load(directory.config)  # refuses a damaged one
    job = job_of(directory)
    about = document(directory, job)
    if as_json:
        print_json(about)
    else:
        print_run(directory, about, job)


@app.command("logs")
def show_logs(
    run: opt.Run,
    rank: Annotated[
        int | None, typer.Option(help="Print only this rank", show_default=False)
    ] = None,
    attempt: Annotated[
        int | None, typer.Option(help="Print this attempt", show_default="the last")
    ] = None,
    stream: Annotated[
        Literal["out", "err"] | None,
        typer.Option(help="Print only this stream", show_default="both"),
    ] = None,
    batch: Annotated[
        bool, typer.Option("--batch", help="Print the output of the batch script of its SLURM job")
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Continue until the run ends")
    ] = False,
) -> None:
    """Print the output of the ranks, each line with its host and rank."""
    from nanoscale.runs.directory import RunDirectory
    from nanoscale.runs.tail import LineTail

    directory = RunDirectory.open(run)
    tails: dict[Path, LineTail] = {}
    going_on = _GoingOn(directory)
    while True:
        more = follow and going_on()
        ranks = () if batch else _log_files(directory, attempt, rank, stream)
        for path in _batch_logs(directory) if batch else ranks:
            _print_lines(path, tails.setdefault(path, LineTail(path)), last=not more)
        if not more:
            break
        time.sleep(_LOOK_S)
    if not tails:
        _refuse_logs(directory, attempt, rank, batch)


class _GoingOn:
    """A test whether a run is active, or waits in SLURM's queue."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._asked = float("-inf")
        self._queued = False

    def __call__(self) -> bool:
        from nanoscale.launch.slurm.jobs import ASK_S, job_of
        from nanoscale.runs import lock

        if lock.owner(self._run) is not None:
            self._asked = float("-inf")
            return True
        if time.monotonic() - self._asked > ASK_S:
            job = job_of(self._run)
            self._asked, self._queued = time.monotonic(), job is not None and job.is_there
        return self._queued


def _batch_logs(run: RunDirectory) -> list[Path]:
    """List the log of the batch script of the run's job."""
    from nanoscale.launch.slurm.jobs import output_of
    from nanoscale.runs import submission

    one = submission.read(run)
    path = output_of(run, one) if one is not None else None
    return [path] if path is not None and path.exists() else []


def _log_files(
    run: RunDirectory,
    attempt: int | None,
    rank: int | None,
    stream: Literal["out", "err"] | None,
) -> list[Path]:
    """List the log files of an attempt, the last if None, by rank, then host, then stream."""
    attempt = run.last_attempt() if attempt is None else attempt
    files = []
    for path in run.attempt_logs(attempt).glob("*.rank-*"):
        who, _, kind = path.name.rpartition(".")
        host, _, number = who.rpartition(".rank-")
        wanted = kind in ("out", "err") and (stream is None or kind == stream)
        if wanted and number.isdecimal() and rank in (None, int(number)):
            files.append((int(number), host, kind != "out", path))
    return [path for *_, path in sorted(files)]


def _print_lines(path: Path, tail: Any, last: bool) -> None:
    host, ranks, rank = path.stem.rpartition(".rank-")
    prefix = f"{host}:{rank} │ ".encode() if ranks else b""
    for lines in tail.batches():
        display.content(b"".join(prefix + line.rstrip() + b"\n" for line in lines))
    if last and (rest := tail.rest()):
        display.content(prefix + rest.rstrip() + b"\n")


def _refuse_logs(run: RunDirectory, attempt: int | None, rank: int | None, batch: bool) -> None:
    from nanoscale.common.errors import UserError, Violation

    have = [path.name.removeprefix("attempt-") for path in sorted(run.logs.glob("attempt-*"))]
    message = f"{run.name} has no such log; its attempts: {', '.join(have) or 'none'}"
    wanted = f"attempt {run.last_attempt() if attempt is None else attempt}"
    wanted += "" if rank is None else f", rank {rank}"
    what = "output of a batch script" if batch else wanted
    printed = not batch and _batch_logs(run)
    other = (
        (shlex.join(["nanoscale", "runs", "logs", run.reference, "--batch"]),) if printed else ()
    )
    violation = Violation("logs", what, "command line", "does not exist", other)
    raise UserError("run", message, [violation])
