"""The table of a sweep's trials, in a file and on a terminal."""

from __future__ import annotations

import io
from typing import Any

import pytest

from nanoscale.view.run.sweep_table import SweepTable


def row(trial: str, state: str, loss: float | None = None) -> dict[str, Any]:
    figures = {"step": 4, "loss": loss, "eval_loss": None, "tokens_per_s": 100.0}
    return {"trial": trial, "state": state, **figures, "memory_gib": 0.1}


def test_states_go_to_the_given_stream(capsys: pytest.CaptureFixture[str]) -> None:
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
