from __future__ import annotations

import time
from pathlib import Path

import pytest

from nanoscale.common.errors import UserError
from nanoscale.config.composing.compose import compose
from nanoscale.config.composing.frozen import load
from nanoscale.config.rules import Devices, check
from nanoscale.launch.lifecycle import prepare
from nanoscale.launch.lifecycle.prepare import (
    check_new_run,
    name_run,
    new_run,
    replace_configuration,
)
from nanoscale.launch.request import Request
from nanoscale.runs import lock, status
from nanoscale.runs.directory import read_json
from tests.support.runs import create_run

CPU = Devices("cpu", 2)


def request(*words):
    composed = compose(["recipe=debug", *words])
    return Request(composed, name_run(composed, check(composed, CPU), repeats=False), CPU)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_new_run_is_written_whole_and_held(folder):
    asked = request("run.name=x")
    with new_run(asked) as held:
        run = held.run
        assert run.path == asked.run.path == folder / "runs" / "x"
        assert load(run.config) == asked.config
        assert lock.owner(run) is not None
        assert status.read(run).state == "prepared"
    assert lock.owner(run) is None
    assert sorted(path.name for path in run.path.iterdir()) == [
        "checkpoints",
        "config.yaml",
        "environment.json",
        "lock",
        "logs",
        "provenance.json",
        "signature",
        "status.json",
    ]


def test_provenance_names_the_writer_and_what_it_overrode():
    with new_run(request("run.name=x", "train.steps=9")) as held:
        entry = read_json(held.run.provenance)["train.steps"]
    assert (entry["value"], entry["source"]) == (9, "command line")
    assert "debug.yaml" in entry["overrode"][0]["source"]


def test_nothing_is_left_where_a_file_cannot_be_written(folder, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(prepare, "environment", full)
    with pytest.raises(OSError, match="No space"), new_run(request("run.name=x")):
        pass
    assert list(folder.iterdir()) == []


def test_names_come_from_the_recipe_and_the_time_and_are_free(folder, monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda _: "20260102-030405")
    assert request().config.run.name == "debug-20260102-030405"
    create_run(Path("runs"), "debug-20260102-030405")
    assert request().config.run.name == "debug-20260102-030405-2"
    taken = request("run.name=debug-20260102-030405")
    with pytest.raises(UserError, match="exists already"):
        check_new_run(taken.config)


def test_the_name_of_a_running_run_does_not_advise_a_resume():
    config = request("run.name=x").config
    with new_run(request("run.name=x")), pytest.raises(UserError) as caught:
        check_new_run(config)
    advice = caught.value.violations[0].suggestions
    run = Path("runs/x").absolute()
    assert advice == ("run.name=x-2", f"nanoscale runs watch {run}", f"nanoscale runs stop {run}")
    with pytest.raises(UserError) as caught:
        check_new_run(config)  # it has ended
    assert caught.value.violations[0].suggestions[1:] == (f"nanoscale resume {run}",)


def test_the_configuration_of_an_earlier_attempt_is_kept_where_it_differs():
    with new_run(request("run.name=x")) as held:
        run = held.run
        before = run.config.read_text()
        further(run, 1)
        assert run.config.read_text() == before
        assert not run.attempt_config(1).exists()
        further(run, 1, "train.steps=50")
        assert run.attempt_config(1).read_text() == before
        assert load(run.config).train.steps == 50


def further(run, attempt, *words):
    changed = compose(words, config_file=run.config)
    asked = Request(changed, check(changed, CPU), CPU, repeats=run.config)
    replace_configuration(run, asked, attempt)


def test_what_was_left_open_stays_open_through_every_attempt():
    with new_run(request("run.name=x", "parallel.dp=2")) as held:
        run = held.run
        assert load(run.config).launcher.devices == 2
        further(run, 1, "parallel.dp=1")
        further(run, 2, "parallel.dp=4")
        further(run, 3, "launcher.devices=4")
        assert load(run.config).launcher.devices == 4
        assert "launcher.devices" not in run.config.read_text().partition("resolved:")[2]
        assert "train.micro_batch: auto" in run.config.read_text().partition("resolved:")[2]
