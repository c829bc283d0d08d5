"""The table of a sweep's trials: live on a terminal, one line per change elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

from nanoscale.common import display

if TYPE_CHECKING:
    from rich.table import Table

Row = dict[str, Any]
_FIGURES = ("step", "loss", "eval_loss", "tokens_per_s")
_MOST_ROWS = 40
"""The most trials in the live table; those that run and the best ones come first."""


class SweepTable:
    """A view of all trials. Use it as a context."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._console = display.console(stream)
        self._live: Any = None
        self._shown: dict[str, str] = {}

    def __enter__(self) -> SweepTable:
        if self._console.is_terminal:
            from rich.live import Live

            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, rows: Sequence[Row]) -> None:
        """Show the rows as they are now."""
        if self._live is not None:
            self._live.update(table(rows[:_MOST_ROWS]), refresh=True)
            return
        for row in rows:
            if self._shown.get(row["trial"], "waiting") != row["state"]:
                self._shown[row["trial"]] = row["state"]
                loss = row["eval_loss"] if row["eval_loss"] is not None else row["loss"]
                figure = "" if loss is None or row["state"] == "running" else f"  loss {loss:.4f}"
                display.show(f"{row['trial']}  {row['state']}{figure}", stream=self._stream)


def print_table(rows: Sequence[Row], stream: TextIO) -> None:
    """Print all trials."""
    display.print_table(display.console(stream), table(rows))


def table(rows: Sequence[Row]) -> Table:
    """Return the rows as a table, with a column for each key that differs."""
    from rich.table import Table

    known = ("trial", "state", *_FIGURES, "memory_gib")
    keys = [name for name in (rows[0] if rows else ()) if name not in known]
    result = Table("trial", "state", "step", "loss", "eval loss", "tokens/s", *keys, box=None)
    for row in rows:
        result.add_row(
            row["trial"],
            row["state"],
            str(row["step"]),
            *("" if row[name] is None else f"{row[name]:.4f}" for name in ("loss", "eval_loss")),
            "" if row["tokens_per_s"] is None else f"{row['tokens_per_s']:,.0f}",
            *(row[key] for key in keys),
        )
    return result
