"""`nanoscale runs report RUN`: a run summed up, on the terminal and as a page."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanoscale.cli.common import options as opt
from nanoscale.cli.common.files import require_writable, write_file
from nanoscale.cli.common.output import console, print_json
from nanoscale.common import display

if TYPE_CHECKING:
    from rich.console import Console

_BLOCKS = "▁▂▃▄▅▆▇█"
_NAMES = {
    "loss": "loss",
    "eval_loss": "eval loss",
    "grad_norm": "grad norm",
    "lr": "lr",
    "tokens_per_s": "tokens/s",
}


def report_run(
    run: opt.Run,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html",
            metavar="FILE",
            help="Write the page to this file",
            show_default="RUN/report.html",
        ),
    ] = None,
    overwrite: opt.Overwrite = False,
    as_json: opt.AsJson = False,
) -> None:
    """Report a run's course and its figures beside the plan, also as a page."""
    from nanoscale.runs.directory import RunDirectory, write_atomically
    from nanoscale.view.run.run_page import report_page
    from nanoscale.view.run.run_report import document

    directory = RunDirectory.open(run)
    if html is not None:
        require_writable("--html", html, overwrite=overwrite)
    about = document(directory)
    page = html or directory.report
    if html is not None:
        write_file("--html", html, report_page(about), overwrite=overwrite)
    else:
        try:
            write_atomically(page, report_page(about))
        except OSError as error:
            display.note(
                f"{page} cannot be written: {error.strerror}; choose another file with --html FILE"
            )
    if as_json:
        print_json(about)
    else:
        _print(console(), about)
        display.show(f"page  {page}")


def _print(screen: Console, about: dict[str, Any]) -> None:
    from rich.table import Table

    from nanoscale.view.run.run_page import compared, head, outcome

    style = {"completed": "green", "failed": "bold red"}.get(about["state"])
    screen.print(about["run"], style="bold", markup=False)
    screen.print("\n".join(head(about)), markup=False, soft_wrap=True)
    screen.print(outcome(about), style=style, markup=False, soft_wrap=True)
    cause = about["failure"]
    if cause is not None and about["state"] != "completed":
        who = f"rank {cause['rank']} on {cause['host']}"
        screen.print(f"{who}: {cause['diagnosis']}", style="red", markup=False, soft_wrap=True)
    screen.print()
    width = max(20, min(screen.width, 100) - 40)
    for name, points in about["curves"].items():
        if points:
            screen.print(_curve(_NAMES[name], points, width), markup=False, soft_wrap=True)
    if about["against_plan"]:
        screen.print()
        table = Table("", "predicted", "measured", "difference", box=None, pad_edge=False)
        for column in table.columns[1:]:
            column.justify = "right"
        for row in about["against_plan"]:
            table.add_row(*compared(row))
        screen.print(table)
    screen.print()
    if len(about["attempts"]) > 1:
        screen.print(f"attempts     {len(about['attempts'])}")
    steps = ", ".join(str(checkpoint["step"]) for checkpoint in about["checkpoints"]) or "none"
    screen.print(f"checkpoints  {steps}", soft_wrap=True)


def _curve(name: str, points: list[tuple[int, float | None]], width: int) -> str:
    """Return one line: first value, the course in blocks, last value; `!` for values that were not finite."""
    values = [value for _, value in points]
    known = [value for value in values if value is not None]
    first, last = ("not finite" if v is None else f"{v:.4g}" for v in (values[0], values[-1]))
    if not known:
        return f"{name:10} {first}"
    low, high = min(known), max(known)
    count = min(width, len(values))
    blocks = []
    for place in range(count):
        some = values[place * len(values) // count : (place + 1) * len(values) // count]
        here = [value for value in some if value is not None]
        if len(here) < len(some):
            blocks.append("!")
            continue
        share = (math.fsum(here) / len(here) - low) / ((high - low) or 1.0)
        blocks.append(_BLOCKS[min(len(_BLOCKS) - 1, int(share * len(_BLOCKS)))])
    return f"{name:10} {first:>10} {''.join(blocks)} {last}"
