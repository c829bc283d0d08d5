"""A sweep on the screen: its plan, its table of trials and its end.

The table is live on a terminal; elsewhere there is a line for each change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any, TextIO

from nanoscale.common import display
from nanoscale.common.units import counted, duration
from nanoscale.runs import failure
from nanoscale.runs.metrics import rises
from nanoscale.runs.tail import read_end
from nanoscale.sweep.sweep import Settings, Sweep, Trial
from nanoscale.view.blocks import Column, Table, rich_table, show_table, table

Row = dict[str, Any]
_MOST_ROWS = 40
"""The most trials in the live table: first the running ones, then the others by loss, the lowest first."""
_SHOWN_LOGS, _LOG_LINES, _LOG_BYTES = 3, 3, 4096
"""The failed trials whose output is shown, its lines, and the bytes in which they are searched."""
_STOPPING = "stopping: trials save a checkpoint; Ctrl-C again ends them without one"


class SweepTable(display.LiveScreen):
    """A view of all trials. Use it as a context."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream, auto_refresh=False)
        self._shown: dict[str, str] = {}
        self._is_stopping = False

    def show(self, rows: Sequence[Row], *, stopping: bool = False) -> None:
        """Show the rows as they are now, and whether their trials are being stopped."""
        if self.live is not None:
            shown = rich_table(_table(most_important(rows)), self.console.width)
            shown.caption, shown.caption_justify = _STOPPING if stopping else None, "left"
            self.live.update(shown, refresh=True)
            return
        if stopping and not self._is_stopping:
            self._is_stopping = True
            display.show(_STOPPING, stream=self.stream)
        for row in rows:
            if self._shown.get(row["trial"], "waiting") != row["state"]:
                self._shown[row["trial"]] = row["state"]
                loss = _loss(row)
                figure = "" if loss is None or row["state"] == "running" else f"  loss {loss:.4f}"
                display.show(f"{row['trial']}  {row['state']}{figure}", stream=self.stream)


def most_important(rows: Sequence[Row]) -> Sequence[Row]:
    """Return the rows of the live table, in their order: all of them unless they are too many."""
    if len(rows) <= _MOST_ROWS:
        return rows

    def importance(number: int) -> tuple[bool, float]:
        loss = _loss(rows[number])
        return rows[number]["state"] != "running", float("inf") if loss is None else loss

    chosen = sorted(sorted(range(len(rows)), key=importance)[:_MOST_ROWS])
    return [rows[number] for number in chosen]


def print_table(rows: Sequence[Row], stream: TextIO) -> None:
    show_table(display.console(stream), _table(rows))


def _figure(name: str, header: str = "") -> Column:
    """Return the column of a text or a number."""

    def text(row: Row) -> str:
        value = row[name]
        return f"{value:.4f}" if isinstance(value, int | float) else value or ""

    return Column(header or name, text, is_text=True)


_COLUMNS = (
    Column("trial", "trial"),  # its name has the values of all keys that differ
    Column("state", "state", is_text=True),
    Column("step", "step"),
    _figure("loss"),
    _figure("eval_loss", "eval loss"),
    Column("tokens/s", lambda it: "" if (n := it["tokens_per_s"]) is None else f"{n:,.0f}"),
)


def _table(rows: Sequence[Row]) -> Table:
    """Return the table of trials, with the sweep's metric if it has no column of its own."""
    names = list(rows[0]) if rows else []
    after = names.index("memory_gib") + 1 if names else 0
    return table((*_COLUMNS, *map(_figure, names[after:])), rows)


def show_plan(
    sweep: Sweep, count: int, costs: Sequence[tuple[float, int]], left: int, at_once: int | None
) -> None:
    """Show how many trials are left, and how long they take by the plan.

    Args:
        count: all trials.
        costs: planned seconds and ranks of trials, of all that are left or of examples.
        left: the trials that have not ended.
        at_once: the trials that run at the same time; None: SLURM decides.
    """
    text = f"sweep {sweep.name}: {counted(count, 'trial')}"
    text += "" if at_once is None else f", {at_once} at once"
    if costs and left:
        each = mean(seconds for seconds, _ in costs)
        hours = mean(seconds * ranks for seconds, ranks in costs) * left / 3600
        text += f"; the plan expects {duration(each)} each, "
        text += "" if at_once is None else f"{duration(each * left / min(at_once, left))} for "
        text += f"{left} of them, {hours:.3g} device hours"
    display.note(text)


def show_end(
    sweep: Sweep, settings: Settings, rows: Sequence[Row], failed: Sequence[Trial], stopped: bool
) -> None:
    """Show the best trial, the output of failed trials, and how to continue.

    Args:
        failed: the trials that have failed since the sweep was started.
        stopped: True if a signal came before the last trial has ended.
    """
    found = best_row(rows, settings.metric)
    if found is not None:
        row, metric = found
        name = "evaluation loss" if metric == "eval_loss" else metric
        best = "highest" if rises(metric) else "lowest"
        display.note(f"{best} {name}: {row['trial']} with {row[metric]:.4f}")
    for trial in failed[:_SHOWN_LOGS]:
        _show_failure(sweep, trial)
    if len(failed) > _SHOWN_LOGS:
        display.note(f"{counted(len(failed) - _SHOWN_LOGS, 'other trial')} failed, too")
    if stopped:
        what = (
            "the jobs continue; to follow them"
            if settings.slurm
            else "stopped; to run what is missing"
        )
        display.note(f"{what}: {sweep.resume_command}")
    elif any(row["state"] == "failed" for row in rows):
        display.note(f"to resume trials that have failed: {sweep.resume_command} --retry")
    display.note(f"the table is in {sweep.path / 'results.csv'}")


def _show_failure(sweep: Sweep, trial: Trial) -> None:
    """Show the first cause of a failed trial; the end of its launcher's output if that refused to start."""
    log = sweep.log(trial)
    display.note(f"{trial.name} failed; its output is in {log}")
    cause = failure.read(sweep.run(trial)) if sweep.state(trial) == "failed" else None
    if cause is not None:
        display.note(f"  {cause.who}: {cause.diagnosis}")
    else:
        lines = read_end(log, _LOG_BYTES).decode(errors="replace").splitlines()
        for line in lines[-_LOG_LINES:]:
            display.note(f"  {line}")


def best_row(rows: Sequence[Row], metric: str) -> tuple[Row, str] | None:
    """Return the completed trial with the best metric, and the metric: the loss if no trial has it."""
    for name in (metric, "loss"):
        completed = (row for row in rows if row["state"] == "completed")
        measured = [row for row in completed if row.get(name) is not None]
        if measured:
            best = max if rises(name) else min
            return best(measured, key=lambda row: float(row[name])), name
    return None


def _loss(row: Mapping[str, Any]) -> float | None:
    loss: float | None = row["eval_loss"] if row["eval_loss"] is not None else row["loss"]
    return loss
