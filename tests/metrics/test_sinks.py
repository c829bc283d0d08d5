from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest

from nanoscale.common.errors import UserError
from nanoscale.config.schema import Config, Logger
from nanoscale.metrics import sinks
from nanoscale.metrics.trackers import Subject
from nanoscale.runs import events, fence
from nanoscale.runs.directory import RunDirectory
from tests.support.runs import create_run


def steps(run: RunDirectory) -> list[int]:
    return [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()]


def write(run: RunDirectory, first: int, last: int, logger: Logger | None = None) -> None:
    fence.begin(run, first)
    config = Config(logger=logger or Logger())
    opened = sinks.open_sinks(Subject(run, config, run.workspace(first), first), first - 1)
    for step in range(first, last + 1):
        for sink in opened:
            sink.write({"step": step, "loss": 1 / step, "mfu": None, "time": 1000.0 + step})
    for sink in opened:
        sink.close("completed")


def test_a_restart_leaves_no_repeat_and_no_torn_line(tmp_path: Path) -> None:
    run = create_run(tmp_path, "run")
    write(run, 1, 9)
    with run.metrics.open("a") as file:
        file.write('{"step": 10, "lo')
    write(run, 6, 12)
    assert steps(run) == list(range(1, 13))


def test_damaged_lines_are_reported_and_cost_only_themselves(tmp_path: Path) -> None:
    run = create_run(tmp_path, "run")
    write(run, 1, 9)
    lines = run.metrics.read_bytes().splitlines(keepends=True)
    damaged = b"".join([*lines[:2], b"\x00\xff" + lines[2][2:], lines[3], b"[]\n", *lines[5:]])
    run.metrics.write_bytes(damaged)
    write(run, 8, 12)
    assert steps(run) == [1, 2, 4, *range(6, 13)]
    (event,) = [event for event in events.read(run) if event["kind"] == "metrics"]
    assert event["message"] == (
        "metrics.jsonl is damaged in line 3, 5: the file is kept as damaged-metrics.jsonl; "
        "the training continues with step 8"
    )
    assert (run.path / "damaged-metrics.jsonl").read_bytes() == damaged


def test_missing_metrics_are_reported(tmp_path: Path) -> None:
    run = create_run(tmp_path, "run")
    write(run, 1, 5)
    assert events.read(run) == []
    run.metrics.unlink()
    write(run, 6, 8)
    assert steps(run) == [6, 7, 8]
    assert "missing: the figures of steps 1 to 5 are lost" in events.read(run)[0]["message"]


def test_metrics_that_cannot_be_read_are_set_aside(tmp_path: Path) -> None:
    run = create_run(tmp_path, "run")
    write(run, 1, 5)
    for number in ("", "-2"):
        run.metrics.unlink()
        run.metrics.mkdir()
        write(run, 6, 8)
        assert steps(run) == [6, 7, 8] and (run.path / f"damaged-metrics.jsonl{number}").is_dir()
    assert "cannot be read (Is a directory)" in events.read(run)[0]["message"]


def test_floats_are_written_in_full(tmp_path: Path) -> None:
    run = create_run(tmp_path, "run")
    write(run, 1, 3)
    assert json.loads(run.metrics.read_text().splitlines()[2])["loss"] == 1 / 3


def test_tensorboard_holds_the_same_figures_without_repeats(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = create_run(tmp_path, "run")
    write(run, 1, 6, Logger("on"))
    write(run, 4, 8, Logger("on"))
    events = EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    losses = events.Scalars("loss")
    assert [event.step for event in losses] == list(range(1, 9))
    assert losses[2].value == pytest.approx(1 / 3)
    assert events.Tags()["scalars"] == ["loss"]


def test_the_table_has_a_column_for_every_figure_and_no_repeats(tmp_path: Path) -> None:
    run = create_run(tmp_path, "run")
    write(run, 1, 6, Logger(csv=True))
    fence.begin(run, 2)
    config = Config(logger=Logger(csv=True))
    opened = sinks.open_sinks(Subject(run, config, run.workspace(2), 2), 4)
    for record in ({"step": 5, "loss": 0.2, "eval_loss": math.nan}, {"step": 6, "loss": 0.125}):
        for sink in opened:
            sink.write(record)
    with run.metrics_csv.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["1", "2", "3", "4", "5", "6"]
    assert [row["eval_loss"] for row in rows] == [""] * 6
    assert float(rows[2]["loss"]) == 1 / 3 and rows[5]["loss"] == "0.125"


def test_tensorboard_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanoscale.common.versions.find_spec", lambda _: None)
    assert not sinks.wants_tensorboard(Logger("auto"))
    assert not sinks.wants_tensorboard(Logger("off"))
    with pytest.raises(UserError, match=r"install 'tensorboard>="):
        sinks.wants_tensorboard(Logger("on"))
