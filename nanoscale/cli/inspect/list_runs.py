"""`nanoscale runs ls`: the runs of a folder in a table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanoscale.cli.common import options as opt
from nanoscale.cli.common.output import console, print_json
from nanoscale.common import display

if TYPE_CHECKING:
    from nanoscale.cli.inspect.columns import Column
    from nanoscale.launch.slurm.jobs import Job
    from nanoscale.runs.directory import RunDirectory


def list_runs(
    root: Annotated[Path, typer.Option(help="List the runs in this folder")] = Path("runs"),
    columns: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,…",
            help="Show these metrics and keys, as in lr,eval_loss,optimizer.lr",
            show_default=False,
        ),
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CONDITION",
            help="List only runs for which it holds: state=failed, 'loss<3'",
            show_default=False,
        ),
    ] = None,
    sort: Annotated[
        str | None,
        typer.Option(
            metavar="[-]COLUMN",
            help="List the lowest value first; with a dash, the highest",
            show_default="created",
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="List only the newest N, or with --sort the first N",
            show_default=False,
        ),
    ] = None,
    as_json: opt.AsJson = False,
) -> None:
    """List the runs, the oldest first. Several --where must all hold."""
    from nanoscale.cli.inspect.columns import column, condition
    from nanoscale.launch.slurm.jobs import jobs_of
    from nanoscale.runs.directory import RunDirectory

    runs = RunDirectory.all(root)
    names = [name.strip() for name in columns.split(",")] if columns is not None else []
    shown = [column(name, runs, "--columns", columns or "") for name in names]
    conditions = [condition(text, runs) for text in where or ()]
    order = column(sort.removeprefix("-"), runs, "--sort", sort) if sort is not None else None
    needed = [*shown, *(it.column for it in conditions), *([order] if order is not None else [])]

    jobs = jobs_of(runs)
    rows = [_row(run, jobs.get(run), needed) for run in runs]
    rows = [row for row in rows if all(it.holds(row) for it in conditions)]
    if order is not None:
        rows = _ordered(rows, order, descending=str(sort).startswith("-"))
    if limit is not None:
        rows = rows[-limit:] if order is None else rows[:limit]
    if as_json:
        print_json(rows)
    elif rows:
        _print_table(rows, shown)
    else:
        such = " such" if conditions and runs else ""
        display.show(f"no{such} runs in {root.absolute()}")


def _ordered(rows: list[dict[str, Any]], order: Column, descending: bool) -> list[dict[str, Any]]:
    """Return the rows by a column; unknown values are last in both directions."""
    known = [row for row in rows if row[order.name] is not None]
    unknown = [row for row in rows if row[order.name] is None]
    return sorted(known, key=order.order, reverse=descending) + unknown


def _row(run: RunDirectory, job: Job | None, columns: list[Column]) -> dict[str, Any]:
    """Return a run's values, or the problem of a damaged file: the other runs are listed anyway."""
    from nanoscale.cli.inspect.columns import values
    from nanoscale.common.errors import UserError

    try:
        return values(run, columns) | summary(run, job)
    except UserError as error:
        unknown = dict.fromkeys((*(it.name for it in columns), *_UNKNOWN))
        return unknown | {"name": run.name, "path": str(run.path), "said": f"damaged: {error}"}


_UNKNOWN = (
    "state", "going_on", "job", "attempt", "exit_code", "step", "steps", "model", "loss", "created",
    "started", "ended",
)  # fmt: skip
"""The unknown keys in the summary of a run with a damaged file."""


def summary(run: RunDirectory, job: Job | None = None) -> dict[str, Any]:
    """Summarise one run in a few values."""
    from nanoscale.config.composing.frozen import read_values
    from nanoscale.launch.slurm.jobs import in_words
    from nanoscale.runs import lock, metrics, status

    now, last = status.require(run), metrics.last(run)
    keys = read_values(run.config, ("train.steps", "model.name"))
    going_on = lock.owner(run) is not None
    return {
        "name": run.name,
        "path": str(run.path),
        "state": now.state,
        "going_on": going_on,
        "said": in_words(now.state, going_on, job),
        "job": job.document() if job else None,
        "attempt": now.attempt,
        "exit_code": now.exit_code,
        "step": last["step"] if last else 0,
        "steps": keys["train.steps"],
        "model": keys["model.name"],
        "loss": last.get("loss") if last else None,
        "created": now.created,
        "started": now.started,
        "ended": now.ended,
    }


def _print_table(rows: list[dict[str, Any]], columns: list[Column]) -> None:
    """Print the runs with some columns, or the usual ones."""
    from rich.table import Table

    from nanoscale.common.units import clock

    usual = ("step", "loss", "model", "attempt", "created")
    names = [column.name for column in columns] or usual
    table = Table("run", "state", *names, box=None)
    for row in rows:
        loss = "" if row["loss"] is None else f"{row['loss']:.4f}"
        count = "?" if row["step"] is None else row["step"]
        steps = "?" if row["steps"] is None else row["steps"]
        attempt = "?" if row["attempt"] is None else str(row["attempt"])
        cells = (f"{count}/{steps}", loss, row["model"] or "?", attempt, clock(row["created"]))
        chosen = [column.text(row) for column in columns] or cells
        table.add_row(row["name"], row["said"], *chosen)
    display.print_table(console(), table)
