"""`nanoscale runs`: look at runs and stop them, from their directories alone."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from nanoscale.cli.common import options as opt
from nanoscale.cli.common.output import print_json
from nanoscale.cli.inspect.compare_runs import compare_runs
from nanoscale.cli.inspect.list_runs import list_runs
from nanoscale.cli.inspect.remove import remove_runs
from nanoscale.cli.inspect.report import report_run
from nanoscale.cli.inspect.tag import tag_run
from nanoscale.cli.inspect.watch import watch_run
from nanoscale.cli.jobs.stop import stop_run
from nanoscale.common import display

if TYPE_CHECKING:
    from nanoscale.runs.directory import RunDirectory
    from nanoscale.runs.tail import LineTail

_LOOK_S = 0.1

app = typer.Typer(
    no_args_is_help=True, help="List, show, follow, tag, report, stop and delete runs."
)
app.command("ls")(list_runs)
app.command("compare")(compare_runs)
app.command("tag")(tag_run)
app.command("rm")(remove_runs)
app.command("stop")(stop_run)
app.command("watch")(watch_run)
app.command("report")(report_run)


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
    rank: int | None = opt.option("Print only this rank"),
    attempt: int | None = opt.option("Print this attempt", shown="the last"),
    stream: Literal["out", "err"] | None = opt.option("Print only this stream", shown="both"),
    batch: bool = opt.option(
        "Print the output of the batch script of its SLURM job", "--batch", default=False
    ),
    follow: bool = opt.option("Continue until the run ends", "--follow", "-f", default=False),
) -> None:
    """Print the output of the ranks, each line with its host and rank."""
    from nanoscale.launch.slurm.jobs import Activity, batch_logs
    from nanoscale.runs.directory import RunDirectory
    from nanoscale.runs.tail import LineTail

    directory = RunDirectory.open(run)
    goes_on: Callable[[], bool] = Activity(directory) if follow else lambda: False
    tails: dict[Path, LineTail] = {}
    more = True
    while more:
        more = goes_on()
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
    from nanoscale.common.errors import UserError, Violation
    from nanoscale.launch.slurm.jobs import batch_logs

    have = [path.name.removeprefix("attempt-") for path in sorted(run.logs.glob("attempt-*"))]
    message = f"{run.name} has no such log; its attempts: {', '.join(have) or 'none'}"
    wanted = f"attempt {run.last_attempt() if attempt is None else attempt}"
    wanted += "" if rank is None else f", rank {rank}"
    what = "output of a batch script" if batch else wanted
    printed = not batch and batch_logs(run)
    other = (
        (shlex.join(["nanoscale", "runs", "logs", run.reference, "--batch"]),) if printed else ()
    )
    violation = Violation("logs", what, "command line", "does not exist", other)
    raise UserError("run", message, [violation])
