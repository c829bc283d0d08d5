"""The output of `nanoscale runs report`: a run summed up on the terminal."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from nanoscale.config.hardware.usual_mfu import usual_mfu_text
from nanoscale.view.run.run_page import compared, head, outcome

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


def print_report(screen: Console, about: dict[str, Any]) -> None:
    """Print a run summed up."""
    from rich.table import Table

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
            screen.print(curve_line(_NAMES[name], points, width), markup=False, soft_wrap=True)
    if about["against_plan"]:
        screen.print()
        table = Table("", "predicted", "measured", "difference", box=None, pad_edge=False)
        for column in table.columns[1:]:
            column.justify = "right"
        for row in about["against_plan"]:
            table.add_row(*compared(row))
        screen.print(table)
    if usual := usual_mfu_text(about["usual_mfu"]):
        screen.print(usual, markup=False, soft_wrap=True)
    screen.print()
    if len(about["attempts"]) > 1:
        screen.print(f"attempts     {len(about['attempts'])}")
    steps = ", ".join(str(checkpoint["step"]) for checkpoint in about["checkpoints"]) or "none"
    screen.print(f"checkpoints  {steps}", soft_wrap=True)


def curve_line(
    name: str,
    points: list[tuple[int, float | None]],
    width: int,
    scale: tuple[float, float] | None = None,
) -> str:
    """Return one line: first value, the course in blocks, last value; `!` for values that were not finite.

    Args:
        scale: the lowest and the highest block; None: the curve's own lowest and highest value.
    """
    values = [value for _, value in points]
    known = [value for value in values if value is not None]
    first, last = ("not finite" if v is None else f"{v:.4g}" for v in (values[0], values[-1]))
    if not known:
        return f"{name:10} {first}"
    low, high = scale or (min(known), max(known))
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
