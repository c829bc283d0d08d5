"""Damaged files of a run folder: one line and exit code 2, never a traceback, nothing silently wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nanoscale.checkpoint import store
from nanoscale.cli.main import run as nanoscale
from nanoscale.config.composing.compose import compose
from nanoscale.config.composing.frozen import dump
from nanoscale.config.rules import Devices, check
from nanoscale.launch.fleet.fleet import Fleet
from nanoscale.launch.lifecycle.command import plan_launch
from nanoscale.plan.predict import predict
from nanoscale.runs import events, failure, fence, status
from nanoscale.runs.directory import write_json
from nanoscale.view.plan.prediction import document as plan_document
from tests.cli import Capsys
from tests.support.runs import create_run

COMMANDS = {
    "runs ls": ("runs", "ls"),
    "runs show": ("runs", "show", "r"),
    "runs logs": ("runs", "logs", "r"),
    "runs report": ("runs", "report", "r"),
    "runs watch": ("runs", "watch", "r"),
    "runs stop": ("runs", "stop", "r"),
    "checkpoints ls": ("checkpoints", "ls", "r"),
    "checkpoints inspect": ("checkpoints", "inspect", "r"),
    "checkpoints verify": ("checkpoints", "verify", "r"),
}
DAMAGES: dict[str, Callable[[Path], object]] = {
    "absent": lambda path: None,
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: None,
    "garbage": lambda path: path.write_bytes(b"\xff\x00\x9b[2J}{" * 40),
    "a folder": lambda path: path.mkdir(),
    "a list": lambda path: path.write_text("[]\n"),
    "an empty mapping": lambda path: path.write_text("{}\n"),
}
_SHOWN = {"runs show", "runs report"}
NEEDS: dict[str, set[str]] = {
    "config.yaml": _SHOWN,
    # `runs stop` needs no status.json if SLURM answers, which it does not here
    "status.json": {*_SHOWN, "runs watch", "runs stop"},
    "metrics.jsonl": {*_SHOWN, "runs watch"},
    "events.jsonl": {*_SHOWN, "runs watch"},
    "failure.json": {*_SHOWN, "runs watch"},
    "plan.json": {"runs report"},
    "launch.json": {"runs report"},
    "slurm.json": {"runs show", "runs watch", "runs stop"},
    "logs/attempt-1/h.rank-0.out": {"runs logs"},
    "checkpoints/step-00000005/manifest.json": {"checkpoints inspect"},
    "checkpoints/step-00000005/a.distcp": set(),
    "environment.json": set(),
    "provenance.json": set(),
}
"""file → the commands that cannot answer without it; all others answer, with exit code 0"""
ALLOWED = {
    # a run that logged nothing, did not fail, or was neither planned nor submitted lacks these
    ("metrics.jsonl", "absent"), ("metrics.jsonl", "empty"), ("metrics.jsonl", "truncated"),
    ("events.jsonl", "absent"), ("events.jsonl", "empty"), ("events.jsonl", "truncated"),
    ("events.jsonl", "an empty mapping"), ("failure.json", "absent"), ("plan.json", "absent"),
    ("launch.json", "absent"), ("slurm.json", "absent"), ("logs/attempt-1/h.rank-0.out", "empty"),
    ("logs/attempt-1/h.rank-0.out", "truncated"), ("logs/attempt-1/h.rank-0.out", "garbage"),
    ("logs/attempt-1/h.rank-0.out", "a list"), ("logs/attempt-1/h.rank-0.out", "an empty mapping"),
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that has every file."""
    root = tmp_path_factory.mktemp("whole") / "runs"
    composed = compose(["recipe=debug", "cluster=cpu", "train.steps=40", "run.name=r"])
    run, config = create_run(root, "r"), check(composed, Devices("cpu", 2))
    run.config.write_text(dump(config, composed.config))
    status.write(run, status.Status("prepared", 0, 100.0).starting(1).ending("failed", 1))
    write_json(run.plan, plan_document(predict(config)))
    events.append(run, "attempt", "", attempt=1, world_size=1)
    record = dict.fromkeys(("loss", "grad_norm", "lr", "step_time_s", "tokens_per_s"), 1.0)
    for step in range(1, 9):
        line = {"step": step, "tokens": 512 * step, "mfu": None, "memory_gib": 0.5, **record}
        with run.metrics.open("a") as file:
            file.write(json.dumps(line) + "\n")
    error = failure.RankFailure("ended", rank=0, local_rank=0, host="h", time=1.0, exit_code=1)
    failure.write(run, failure.digest(run, 1, [error], {}))
    write_json(run.launch, plan_launch(config, run, 1).document())
    write_json(run.submission, {"job": "7", "task": None, "script": None})
    write_json(run.environment, {"gpus": []})
    write_json(run.provenance, {})
    log = run.log(1, "h", 0, "out")
    log.parent.mkdir()
    log.write_text("a line\nanother\n")
    fence.begin(run, 1)
    staging = store.staging_path(run.workspace(1), 5)
    staging.mkdir()
    (staging / "a.distcp").write_bytes(b"x" * 1000)
    about = {"step": 5, "consumed_samples": 40, "tokens": 640, "world_size": 1, "time": 1.0}
    store.publish(staging, {**about, "tensors": {}}, store.sum_files(staging.iterdir()))
    return root


@pytest.fixture
def run(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(whole, tmp_path / "runs", symlinks=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))  # without SLURM's programs
    return tmp_path / "runs" / "r"


def expected(command: str, file: str, damage: str) -> set[int]:
    """Return the exit codes that report the damage."""
    if command == "checkpoints verify" and file.startswith("checkpoints/"):
        return {1}
    if file == "config.yaml" and damage in ("absent", "a folder"):  # it is not a run then
        return {0} if command == "runs ls" else {2}
    if command == "runs ls":  # the other runs are listed anyway
        return {0}
    if command in NEEDS[file] and (file, damage) not in ALLOWED:
        return {2}
    return {1} if command == "runs watch" else {0}


@pytest.mark.slow
@pytest.mark.parametrize("file", NEEDS)
def test_a_damaged_file_is_named_in_one_line(
    file: str, run: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    path = run / file
    intact = path.read_bytes()
    for damage, spoil in DAMAGES.items():
        path.unlink()
        if damage == "truncated":
            path.write_bytes(intact[: len(intact) // 2])
        spoil(path)
        for command, words in COMMANDS.items():
            code = nanoscale(list(words))
            out, err = (each.decode(errors="replace") for each in capsysbinary.readouterr())
            what = (command, damage, code, err)
            assert "Traceback" not in err and "internal error" not in err, what
            assert code in expected(command, file, damage), what
            if code == 2:
                assert err.count("error:") == 1 and not out, what
                assert err.startswith("error: ") or command == "runs watch", what
                named = path.name in err or (file, command) == ("status.json", "runs stop")
                assert named or damage == "absent" or file == "config.yaml", what
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        path.write_bytes(intact)


def test_an_event_without_a_message_is_shown(run: Path, capsys: Capsys) -> None:
    with (run / "events.jsonl").open("a") as file:
        file.write('{"kind": "odd", "time": 3.0}\n{"message": "no kind"}\n')
    assert nanoscale(["runs", "show", "r"]) == 0
    shown = capsys.readouterr().out
    assert "odd" in shown and "no kind" in shown


def test_a_run_with_a_damaged_file_does_not_hide_the_others(run: Path, capsys: Capsys) -> None:
    shutil.copytree(run, run.parent / "other")
    (run / "status.json").write_text("")
    assert nanoscale(["runs", "ls"]) == 0
    shown = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert any("status.json is empty" in line for line in lines)
    assert any(line.startswith("other failed 8/40") for line in lines), shown


def test_an_unknown_key_under_resolved_is_named(run: Path, capsys: Capsys) -> None:
    config = run / "config.yaml"
    text = config.read_text()
    for name in ("train.stepz", "7", "train", "train.steps.x"):
        config.write_text(text.replace("\nresolved:\n", f"\nresolved:\n  {name}: 3\n"))
        for words in (["config", "show", "--config", str(config)], ["runs", "show", "r"]):
            assert nanoscale(words) == 2
            error = capsys.readouterr().err
            assert error.startswith(f"error: {name}=3: unknown key") and "config.yaml:" in error


def test_a_page_that_cannot_be_written_is_one_line(run: Path, capsys: Capsys) -> None:
    for words in (
        ["plan", "recipe=debug", "cluster=h100-sxm", "--html", "/proc/x.html"],
        ["runs", "report", "r", "--html", "/proc/x.html"],
    ):
        assert nanoscale(words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ") and "/proc/x.html" in line


def test_a_hello_without_a_version_is_one_of_an_unknown_version() -> None:
    member: Any = SimpleNamespace(unpacker=SimpleNamespace(feed=lambda _: [{"kind": "hello"}]))
    assert Fleet.__new__(Fleet)._read_messages(member, b"") == []
    assert member.nanoscale == "of an unknown version"
