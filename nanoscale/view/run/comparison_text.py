"""The output of `nanoscale runs compare`: tables and curves side by side, on the terminal and as a page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanoscale.common.units import duration
from nanoscale.config.violations import shown
from nanoscale.view.charts import curves
from nanoscale.view.page import render
from nanoscale.view.run.report_text import curve_line
from nanoscale.view.run.run_page import figure

if TYPE_CHECKING:
    from rich.console import Console

    from nanoscale.view.run.comparison import Document

Rows = list[tuple[str, ...]]
_ROWS = {
    "state": "", "step": "", "tokens": "", "seconds": "s", "loss": "loss", "eval_loss": "loss",
    "step_time_s": "s", "tokens_per_s": "", "memory_gib": "GiB",
}  # fmt: skip
"""The values of each run and their units."""


def print_comparison(screen: Console, about: Document) -> None:
    """Print a comparison."""
    from rich.table import Table

    from nanoscale.common.display import print_table

    names = [run["name"] for run in about["runs"]]
    for rows in (_figures(about), _keys(about), _losses(about)):
        table = Table("", *names, box=None, pad_edge=False)
        for row in rows:
            table.add_row(*row)
        if rows:
            print_table(screen, table)
            screen.print()
    width = max(20, min(screen.width, 100) - 40)
    for metric, series in about["curves"].items():
        screen.print(metric, style="bold")
        known = [value for points in series for _, value in points if value is not None]
        longest = max(points[-1][0] for points in series if points)
        for name, points in zip(names, series, strict=True):
            if points:
                part = max(1, round(width * points[-1][0] / longest))
                scale = (min(known), max(known)) if known else None
                screen.print(curve_line(name, points, part, scale), markup=False, soft_wrap=True)


def comparison_page(about: Document) -> str:
    """Return the comparison as a page with charts."""
    names = [run["name"] for run in about["runs"]]
    charts = [
        curves(metric, list(zip(names, series, strict=True)), width=960, height=320)
        for metric, series in about["curves"].items()
    ]
    return render(
        "comparison.html",
        title="comparison of " + ", ".join(names),
        names=["", *names],
        figures=_figures(about),
        keys=_keys(about),
        losses=_losses(about),
        charts=charts,
    )


def _figures(about: Document) -> Rows:
    """Return the rows that a run has a value for."""
    rows = [
        (name, *(_figure(run[name], unit) for run in about["runs"])) for name, unit in _ROWS.items()
    ]
    return [row for row in rows if any(row[1:])]


def _keys(about: Document) -> Rows:
    return [(row["key"], *map(shown, row["values"])) for row in about["keys"]]


def _losses(about: Document) -> Rows:
    return [
        (f"loss at {_point(row)}", *(_figure(loss, "loss") for loss in row["losses"]))
        for row in about["losses"]
    ]


def _point(row: Document) -> str:
    if row["axis"] == "seconds":
        return duration(row["at"])
    return f"step {row['at']:,}" if row["axis"] == "step" else f"{row['at']:,} tokens"


def _figure(value: Any, unit: str) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:.4f}" if unit == "loss" else figure(value, unit)
