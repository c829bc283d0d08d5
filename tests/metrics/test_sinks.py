from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from nanoscale.config.schema import Logger
from nanoscale.errors import UserError
from nanoscale.metrics import sinks
from nanoscale.runs import fence
from nanoscale.runs.directory import RunDirectory


def steps(run: RunDirectory) -> list[int]:
    return [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()]


def write(run: RunDirectory, first: int, last: int, logger: Logger | None = None) -> None:
    fence.begin(run, first)
    opened = sinks.open_sinks(run, run.workspace(first), logger or Logger(), first - 1)
    for step in range(first, last + 1):
        for sink in opened:
            sink.write({"step": step, "loss": 1 / step, "mfu": None, "time": 1000.0 + step})
    for sink in opened:
        sink.close()


def test_a_restart_leaves_no_repeat_and_no_torn_line(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "run")
    write(run, 1, 9)
    with run.metrics.open("a") as file:
        file.write('{"step": 10, "lo')
    write(run, 6, 12)
    assert steps(run) == list(range(1, 13))


def test_floats_are_written_in_full(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "run")
    write(run, 1, 3)
    assert json.loads(run.metrics.read_text().splitlines()[2])["loss"] == 1 / 3


def test_tensorboard_holds_the_same_figures_without_repeats(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = RunDirectory.create(tmp_path, "run")
    write(run, 1, 6, Logger("on"))
    write(run, 4, 8, Logger("on"))
    events = EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    losses = events.Scalars("loss")
    assert [event.step for event in losses] == list(range(1, 9))
    assert losses[2].value == pytest.approx(1 / 3)
    assert events.Tags()["scalars"] == ["loss"]


def test_tensorboard_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert not sinks.wants_tensorboard(Logger("auto"))
    assert not sinks.wants_tensorboard(Logger("off"))
    with pytest.raises(UserError, match=r"install 'tensorboard>="):
        sinks.wants_tensorboard(Logger("on"))
