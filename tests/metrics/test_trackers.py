"""Trackers, read with their own programs: Weights & Biases' offline files and MLflow's database."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from nanoscale.common.errors import UserError
from nanoscale.config.composing.compose import compose
from nanoscale.config.rules import Devices, check
from nanoscale.config.schema import Config, Launcher, Logger, Optimizer, Run
from nanoscale.launch.lifecycle.command import _is_inherited
from nanoscale.metrics import trackers
from nanoscale.metrics.sinks import open_sinks
from nanoscale.metrics.trackers import Subject
from nanoscale.runs import events, fence
from nanoscale.runs.directory import RunDirectory
from tests.support.recipes import changed
from tests.support.runs import create_run
from tests.support.waiting import wait_until

ONE_CPU = Devices("cpu", 1)
SECRET = "hf_do-not-send-me"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    for name in ("MLFLOW_TRACKING_URI", "WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MY_TOKEN", SECRET)
    monkeypatch.setattr(trackers, "CLOSE_S", dict.fromkeys(trackers.CLOSE_S, 200.0))
    return create_run(tmp_path, "run")


def configured(**logger: Any) -> Config:
    return Config(
        run=Run(name="run", tags=["first", "paper"]),
        logger=Logger(**logger),
        launcher=Launcher(env={"PRIVATE": SECRET}),
    )


def write(run: RunDirectory, config: Config, first: int, last: int, outcome: str) -> None:
    """Write the steps of an attempt, and end it."""
    fence.begin(run, first)
    sinks = open_sinks(Subject(run, config, run.workspace(first), first), first - 1)
    for step in range(first, last + 1):
        for sink in sinks:
            sink.write({"step": step, "loss": 1 / step, "mfu": None, "time": 1000.0 + step})
    for sink in sinks:
        sink.flush()
        sink.close(outcome)


# --- MLflow ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_mlflow_has_one_run_for_all_attempts(run: RunDirectory) -> None:
    from mlflow import MlflowClient

    config = configured(mlflow="on")
    write(run, config, 1, 6, "stopped")
    client = MlflowClient(tracking_uri=f"sqlite:///{run.path.parent / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("nanoscale")
    assert experiment is not None
    (stopped,) = client.search_runs([experiment.experiment_id])
    assert stopped.info.status == "KILLED"
    slower = replace(config, optimizer=Optimizer(lr=1e-5))
    write(run, slower, 5, 8, "completed")  # steps 5 and 6 were lost with the attempt
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED" and found.info.run_name == "run"
    history = client.get_metric_history(found.info.run_id, "loss")
    assert [(metric.step, metric.value) for metric in history] == [
        (step, 1 / step) for step in range(1, 9)
    ]
    assert found.data.params["optimizer.lr"] == str(config.optimizer.lr)
    assert found.data.tags["resumed.optimizer.lr"] == "1e-05"
    assert found.data.tags["first"] == found.data.tags["paper"] == "true"
    assert SECRET not in str(found.data.params) + str(found.data.tags)
    assert "mfu" not in found.data.metrics


@pytest.mark.slow
def test_a_kill_before_the_number_is_written_leaves_no_second_run(run: RunDirectory) -> None:
    from mlflow import MlflowClient

    config = configured(mlflow="on")
    write(run, config, 1, 2, "stopped")
    run.trackers.unlink()
    write(run, config, 3, 4, "completed")
    client = MlflowClient(tracking_uri=f"sqlite:///{run.path.parent / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("nanoscale")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    steps = [metric.step for metric in client.get_metric_history(found.info.run_id, "loss")]
    assert steps == [1, 2, 3, 4]


@pytest.mark.slow
def test_steps_that_a_tracker_has_missed_are_sent_when_the_run_continues(run: RunDirectory) -> None:
    from mlflow import MlflowClient

    write(run, configured(), 1, 4, "stopped")
    write(run, configured(mlflow="on"), 5, 6, "completed")
    client = MlflowClient(tracking_uri=f"sqlite:///{run.path.parent / 'mlflow.db'}")
    (experiment,) = client.search_experiments(filter_string="name = 'nanoscale'")
    (found,) = client.search_runs([experiment.experiment_id])
    steps = [metric.step for metric in client.get_metric_history(found.info.run_id, "loss")]
    assert steps == [1, 2, 3, 4, 5, 6]


# --- Weights & Biases ------------------------------------------------------------------------------


@pytest.mark.slow
def test_wandb_has_one_run_for_all_attempts(run: RunDirectory) -> None:
    config = configured(wandb="offline")
    write(run, config, 1, 6, "stopped")
    write(run, config, 5, 8, "completed")
    files = sorted(run.path.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2
    for file in files:  # wandb's own process may still write when the run was finished
        wait_until(lambda file=file: any(it.HasField("exit") for it in wandb_records(file)))
    records = [record for file in files for record in wandb_records(file)]
    names = {record.run.run_id for record in records if record.HasField("run")}
    assert len(names) == 1
    steps = [
        {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    assert [(int(step["_step"]), float(step["loss"])) for step in steps] == [
        (step, 1 / step) for step in range(1, 9)
    ]
    (first, *_) = [record.run for record in records if record.HasField("run")]
    assert first.project == "nanoscale" and list(first.tags) == ["first", "paper"]
    sent = {item.key for item in first.config.update}
    assert {"model", "train", "provenance"} <= sent
    assert all(
        SECRET.encode() not in file.read_bytes() for file in run.path.glob("wandb/**/*.wandb")
    )


def wandb_records(path: Path) -> Iterator[Any]:
    """Yield the records of an offline run: a log in LevelDB's format after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, position, pending = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        if position + 7 + length > len(data):
            return  # it is still being written
        pending += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record: Any = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
            record.ParseFromString(pending)
            yield record
            pending = b""


# --- failures --------------------------------------------------------------------------------------


def test_a_tracker_that_cannot_be_reached_ends_no_training(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
        write(run, configured(mlflow="on", mlflow_uri=address), 1, 3, "completed")
    (event,) = [event for event in events.read(run) if event["kind"] == "tracker"]
    assert event["message"].startswith("mlflow failed (")
    assert event["message"].endswith("); the training continues without it")
    assert len(run.metrics.read_text().splitlines()) == 3


def test_a_tracker_that_does_not_answer_delays_the_end_only_so_long(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "CLOSE_S", {"completed": 0.05})
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        write(run, configured(mlflow="on", mlflow_uri=address), 1, 3, "completed")
        (event,) = [event for event in events.read(run) if event["kind"] == "tracker"]
    assert "was still sending" in event["message"]


# --- the request -----------------------------------------------------------------------------------


def test_several_loggers_are_chosen_together() -> None:
    chosen = compose(["recipe=debug", "logger.wandb=offline", "logger=[csv,mlflow]"]).config.logger
    assert (chosen.csv, chosen.mlflow, chosen.wandb, chosen.tensorboard) == (
        True,
        "on",
        "offline",
        "off",
    )
    with pytest.raises(UserError) as raised:
        compose(["recipe=debug", "logger=[csv,mlflw]"])
    (wrong,) = raised.value.violations
    assert wrong.suggestions[0] == "logger=mlflow"


def test_wandb_without_a_key_is_refused_before_the_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError) as raised:
        check(changed("logger.wandb=online"), ONE_CPU)
    (wrong,) = raised.value.violations
    assert wrong.key == "logger.wandb" and "wandb login" in wrong.message
    assert wrong.suggestions == ("logger.wandb=offline", "logger.wandb=off")
    for advice in wrong.suggestions:
        check(changed(advice), ONE_CPU)
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password 0123\n")
    check(changed("logger.wandb=online"), ONE_CPU)


def test_the_variables_of_a_tracker_reach_other_hosts_only_if_it_is_used() -> None:
    names = ("WANDB_API_KEY", "MLFLOW_TRACKING_URI")
    for logger, passed in ((Logger(), []), (Logger(wandb="online"), [names[0]])):
        config = Config(launcher=Launcher(name="ssh"), logger=logger)
        assert [name for name in names if _is_inherited(config, name)] == passed


def test_every_tracker_of_the_schema_is_in_the_table() -> None:
    files = {"tensorboard", "csv"}  # outputs of nanoscale itself, in metrics/sinks.py
    choices = {field.name for field in fields(Logger) if field.default in ("off", False)}
    assert choices - files == {*trackers.TRACKERS}
