"""`nanoscale runs`: list, show, compare and report runs, from their directories alone."""

import os
import shlex
from collections.abc import Callable
from pathlib import Path

import typer

from nanoscale.cli.common import options as opt
from nanoscale.cli.common.output import (
    answer,
    print_json,
    require_writable,
    show_report,
    write_page,
)
from nanoscale.cli.inspect.run_changes import remove_runs, stop_run, tag_run
from nanoscale.cli.inspect.run_output import explain_run, show_logs, watch_run
from nanoscale.common import display
from nanoscale.common.errors import UserError
from nanoscale.runs.directory import RunDirectory, write_atomically
from nanoscale.view.blocks import page

app = typer.Typer(
    no_args_is_help=True, help="List, show, follow, tag, report, stop and delete runs."
)


def show_run(run: opt.Run, as_json: opt.AsJson = False) -> None:
    """Show the state of a run, its figures and its events."""
    from nanoscale.config.composing.frozen import load
    from nanoscale.launch.batch.jobs import job_of
    from nanoscale.view.run.run_table import document, print_run

    directory = RunDirectory.open(run)
    load(directory.config)  # refuses a damaged one
    job = job_of(directory)
    about = document(directory, job)
    answer(as_json, about, print_run, directory, about, job)


def list_runs(
    root: Path = opt.option("List the runs in this folder", default=Path("runs")),
    columns: str | None = opt.option(
        "Show these metrics and keys, as in lr,eval_loss,optimizer.lr", metavar="A,B,…"
    ),
    where: list[str] | None = opt.option(
        "List only runs for which it holds: state=failed, 'loss<3'", metavar="CONDITION"
    ),
    sort: str | None = opt.option(
        "List the lowest value first; with a dash, the highest",
        metavar="[-]COLUMN",
        shown="created",
    ),
    limit: int | None = opt.option(
        "List only the newest N, or with --sort the first N", metavar="N", min=1
    ),
    as_json: opt.AsJson = False,
) -> None:
    """List the runs, the oldest first. Several --where must all hold."""
    from nanoscale.launch.batch.jobs import jobs_of
    from nanoscale.sweep.sweep import ROOT
    from nanoscale.view.run.run_table import column, condition, print_runs, row

    runs = RunDirectory.all(root)
    names = [name.strip() for name in columns.split(",")] if columns is not None else []
    shown = [column(name, runs, "--columns", columns or "") for name in names]
    conditions = [condition(text, runs) for text in where or ()]
    order = column(sort.removeprefix("-"), runs, "--sort", sort) if sort is not None else None
    needed = [*shown, *(it.column for it in conditions), *([order] if order is not None else [])]

    jobs = jobs_of(runs)
    rows = [row(run, jobs.get(run), needed) for run in runs]
    rows = [values for values in rows if all(it.holds(values) for it in conditions)]
    if order is not None:
        known = [row for row in rows if row[order.name] is not None]
        unknown = [row for row in rows if row[order.name] is None]  # last in both directions
        rows = sorted(known, key=order.order, reverse=str(sort).startswith("-")) + unknown
    if limit is not None:
        rows = rows[-limit:] if order is None else rows[:limit]
    if as_json:
        print_json(rows)
    elif rows:
        print_runs(rows, shown)
    else:
        such = " such" if conditions and runs else ""
        display.show(f"no{such} runs in {root.absolute()}")
    if not as_json and not conditions:
        for file in sorted(root.absolute().parent.glob(f"{ROOT}/*/sweep.json")):
            path = os.path.relpath(file.with_name("runs"))
            list_them = shlex.join(["nanoscale", "runs", "ls", "--root", path])
            display.note(f"trials of the sweep {file.parent.name}: {list_them}")


_MOST = 8
"""The colors of a chart."""


def compare_runs(
    runs: opt.Runs,
    html: opt.Html = None,
    overwrite: opt.Overwrite = False,
    as_json: opt.AsJson = False,
) -> None:
    """Compare runs: keys that differ, losses at equal steps, tokens and time, speed, memory."""
    from nanoscale.view.run.comparison import comparison_report, document

    opened = list(dict.fromkeys(RunDirectory.open(name) for name in runs))
    if not 2 <= len(opened) <= _MOST:
        raise UserError("usage", f"name 2 to {_MOST} different runs, not {len(opened)}")
    require_writable("--html", html, overwrite=overwrite)
    about = document(opened)
    report = comparison_report(about)
    write_page(html, report, overwrite=overwrite)
    answer(as_json, about, show_report, report, html)


def report_run(
    run: opt.Run,
    html: Path | None = opt.option(
        "Write the page to this file", metavar="FILE", shown="RUN/report.html"
    ),
    overwrite: opt.Overwrite = False,
    as_json: opt.AsJson = False,
) -> None:
    """Report a run's course and its figures compared with the plan, also as a page."""
    from nanoscale.view.run.run_report import document, run_report

    directory = RunDirectory.open(run)
    require_writable("--html", html, overwrite=overwrite)
    about = document(directory)
    report, file = run_report(about), html or directory.report
    write_page(html, report, overwrite=overwrite)
    if html is None:
        try:
            write_atomically(file, page(report))
        except OSError as error:
            what = f"{file} cannot be written: {error.strerror}"
            display.note(f"{what}; choose another file with --html FILE")
    answer(as_json, about, show_report, report, file)


_COMMANDS: dict[str, Callable[..., int | None]] = {
    "ls": list_runs, "compare": compare_runs, "tag": tag_run, "rm": remove_runs, "stop": stop_run,
    "watch": watch_run, "explain": explain_run, "report": report_run, "show": show_run,
    "logs": show_logs,
}  # fmt: skip
for _name, _verb in _COMMANDS.items():
    app.command(_name)(_verb)
