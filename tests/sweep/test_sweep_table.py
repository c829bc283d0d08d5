"""The table of a sweep's trials, in a file and on a terminal."""

from __future__ import annotations

import io
import sys
from typing import Any

from nanoscale.view.run.sweep_table import SweepTable, best_row, most_important, print_table
from tests.cli import Capsys


def row(trial: str, state: str, loss: float | None = None) -> dict[str, Any]:
    figures = {"step": 4, "loss": loss, "eval_loss": None, "tokens_per_s": 100.0}
    return {"trial": trial, "state": state, **figures, "memory_gib": 0.1}


def test_states_go_to_the_given_stream(capsys: Capsys) -> None:
    """Standard output holds the JSON document alone."""
    stream = io.StringIO()
    with SweepTable(stream) as view:
        view.show([row("seed=1", "running"), row("seed=2", "waiting")])
        view.show([row("seed=1", "completed", 3.0), row("seed=2", "running")])
    assert stream.getvalue().splitlines() == [
        "seed=1  running",
        "seed=1  completed  loss 3.0000",
        "seed=2  running",
    ]
    assert capsys.readouterr().out == ""


def test_the_metric_has_a_column(capsys: Capsys) -> None:
    rows = [row("a", "completed", 1.0) | {"eval_accuracy": 0.75}]
    print_table(rows, sys.stdout)
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("eval_accuracy") and second.endswith("0.7500")


def test_the_lowest_metric_is_not_compared_with_another() -> None:
    rows = [row("a", "completed", 1.0), row("b", "completed", 3.0), row("c", "failed", 0.5)]
    assert best_row(rows, "eval_loss") == (rows[0], "loss")
    rows[1]["eval_loss"] = 2.0
    assert best_row(rows, "eval_loss") == (rows[1], "eval_loss")
    assert best_row(rows, "loss") == (rows[0], "loss")
    assert best_row(rows[2:], "loss") is None
    for number, one in enumerate(rows):
        one["eval_accuracy"] = 0.5 + number / 10
    assert best_row(rows, "eval_accuracy") == (rows[1], "eval_accuracy"), (
        "the highest of those that ended"
    )


def test_running_trials_and_the_best_ones_are_among_many() -> None:
    rows = [row(str(number), "completed", 100.0 - number) for number in range(50)]
    rows[3]["state"] = "running"
    shown = [one["trial"] for one in most_important(rows)]
    assert shown == ["3", *map(str, range(11, 50))]
