"""Recorded steps of a real training: the chosen ones, of the chosen ranks, through a stop; all else stays."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nanoscale.config.schema import Checkpoint, Config, Profile
from nanoscale.config.values.forms import series_of
from nanoscale.runs import events
from nanoscale.runs.directory import RunDirectory
from tests.support.jobs import (
    StopBefore,
    make_config,
    make_run,
    packed_data,
    read_metrics,
    train,
    write_documents,
)


def names_in(trace: Path) -> Counter[str]:
    with gzip.open(trace) as file:
        return Counter(event.get("name", "") for event in json.load(file)["traceEvents"])


def figures(run: RunDirectory) -> list[tuple[float, float]]:
    return [(record["loss"], record["grad_norm"]) for record in read_metrics(run)]


@pytest.mark.slow
def test_the_chosen_steps_of_the_chosen_ranks(tmp_path: Path) -> None:
    write_documents(tmp_path)
    config = make_config(
        tmp_path, dp=2, stage=2, checkpoint=Checkpoint(at_end=False), micro_batch=4
    )
    config = replace(config, data=packed_data(tmp_path), train=replace(config.train, steps=8))
    plain = make_run(config, "plain")
    train(plain, config)
    assert not plain.profile.exists()
    recorded = replace(config, profile=Profile(steps=[3, 4, 5, 8], ranks=[1]))
    run = make_run(recorded)
    assert train(run, recorded, StopBefore(4)) == ["stopped", "stopped"]
    assert train(run, recorded) == ["completed", "completed"]
    assert figures(run) == figures(plain)
    series = {"steps-3-4": 2, "step-5": 1, "step-8": 1}
    assert {path.name for path in run.profile.iterdir()} == {
        f"{name}.rank-1.{kind}" for name in series for kind in ("trace.json.gz", "txt")
    }
    for name, steps in series.items():
        seen = names_in(run.profile / f"{name}.rank-1.trace.json.gz")
        assert seen["nanoscale: step"] == seen["nanoscale: data"] == steps
        assert seen["Optimizer.step#LocalAdamW.step"] == steps and seen["aten::mm"] >= steps
        text = (run.profile / f"{name}.rank-1.txt").read_text()
        # Which operations are among the longest depends on what else the machine does.
        for words in ("of rank 1", "backward", "optimizer", "communication", "aten::"):
            assert words in text
    said = [event for event in events.read(run) if event["kind"] == "profile"]
    assert [(event["first"], event["last"]) for event in said] == [(3, 4), (5, 5), (8, 8)]
    assert str(run.profile) in said[0]["message"]


@pytest.mark.parametrize(
    ("steps", "series"),
    [
        (None, []),
        (7, [(7, 7)]),
        ("7", [(7, 7)]),
        ("10-12", [(10, 12)]),
        ([20, 4, 3, 3], [(3, 4), (20, 20)]),
    ],
)
def test_series(steps: Any, series: list[tuple[int, int]]) -> None:
    assert series_of(steps) == series


@pytest.mark.parametrize("steps", ["a", "10:12", "12-10", "0-3", "0", "-3", "1-2-3"])
def test_no_series(steps: str) -> None:
    with pytest.raises(ValueError, match=f"^{steps}$"):
        series_of(steps)


def test_a_folder_that_cannot_be_written_ends_no_training(tmp_path: Path) -> None:
    write_documents(tmp_path)
    config: Config = make_config(tmp_path, micro_batch=4, profile=Profile(steps=1))
    config = replace(config, data=packed_data(tmp_path), train=replace(config.train, steps=2))
    run = make_run(config)
    run.profile.write_text("a file")
    assert train(run, config) == ["completed"]
    event = events.last(run, "profile")
    assert event is not None and "rank 0 could not be written" in event["message"]
