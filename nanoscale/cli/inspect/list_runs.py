"""`nanoscale runs ls`: the runs of a folder in a table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoscale.cli.common import options as opt
from nanoscale.cli.common.output import print_json
from nanoscale.common import display

if TYPE_CHECKING:
    from nanoscale.view.run.run_table import RunColumn


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
    from nanoscale.launch.slurm.jobs import jobs_of
    from nanoscale.runs.directory import RunDirectory
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
        rows = _ordered(rows, order, descending=str(sort).startswith("-"))
    if limit is not None:
        rows = rows[-limit:] if order is None else rows[:limit]
    if as_json:
        print_json(rows)
    elif rows:
        print_runs(rows, shown)
    else:
        such = " such" if conditions and runs else ""
        display.show(f"no{such} runs in {root.absolute()}")


def _ordered(
    rows: list[dict[str, Any]], order: RunColumn, descending: bool
) -> list[dict[str, Any]]:
    """Return the rows by a column; unknown values are last in both directions."""
    known = [row for row in rows if row[order.name] is not None]
    unknown = [row for row in rows if row[order.name] is None]
    return sorted(known, key=order.order, reverse=descending) + unknown
