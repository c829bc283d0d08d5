from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from nanoscale.cli.main import run as nanoscale
from nanoscale.config.compose import compose
from nanoscale.config.frozen import dump
from nanoscale.config.rules import Devices, check
from nanoscale.runs import events, failure, status
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.failure import Evidence, RankFailure
from nanoscale.runs.lock import RunLock

RECORD = {
    "step": 7,
    "loss": 1.25,
    "grad_norm": 1.0,
    "lr": 1e-3,
    "tokens": 1,
    "step_time_s": 0.5,
    "tokens_per_s": 10.0,
    "mfu": None,
    "memory_gib": 0.5,
    "time": 1.0,
}

HOLD = """
import signal, sys
from pathlib import Path
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.lock import RunLock
with RunLock(RunDirectory(Path(sys.argv[1]))):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    if len(sys.argv) > 2:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("held", flush=True)
    signal.pause()
    signal.pause()
"""


def make(root, name, state, created):
    composed = compose(["recipe=debug", f"run.name={name}"])
    run = RunDirectory.create(root, name)
    run.config.write_text(dump(check(composed, Devices("cpu", 2)), composed.config))
    status.write(run, status.Status("prepared", 0, created).starting(1).ending(state, 0))
    run.metrics.write_text(json.dumps(RECORD) + "\n")
    return run


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    older = make(tmp_path / "runs", "b", "completed", 100.0)
    newer = make(tmp_path / "runs", "a", "failed", 200.0)
    return older, newer


def test_ls_is_in_the_order_of_creation(runs, capsys):
    assert nanoscale(["runs", "ls", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == ["b", "a"]
    assert (rows[0]["step"], rows[0]["steps"], rows[0]["loss"]) == (7, 20, 1.25)
    assert nanoscale(["runs", "ls"]) == 0
    text = capsys.readouterr().out
    assert "7/20" in text and "completed" in text and "1.2500" in text


def test_ls_without_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert nanoscale(["runs", "ls"]) == 0
    assert "no runs in" in capsys.readouterr().out


def test_a_launcher_that_was_killed_is_seen(runs, capsys):
    run = runs[0]
    status.write(run, status.read(run).starting(2).running())
    assert nanoscale(["runs", "ls"]) == 0
    assert "running, then lost" in capsys.readouterr().out
    with RunLock(run):
        assert nanoscale(["runs", "show", "b", "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert (shown["state"], shown["going_on"]) == ("running", True)


def test_a_damaged_configuration_does_not_hide_the_run(runs, capsys):
    runs[0].config.write_text("train: [")
    assert nanoscale(["runs", "ls"]) == 0
    assert "7/?" in capsys.readouterr().out


def test_show_tells_what_happened(runs, capsys):
    run = runs[1]
    events.append(run, "checkpoint", "step-00000007 saved")
    (run.checkpoint(7)).mkdir()
    killed = RankFailure(1, 1, "h", 1.0, exit_code=-9)
    failure.write(run, failure.digest(run, 1, [killed], {killed.host: Evidence(oom_kills=1)}))
    assert nanoscale(["runs", "show", "a"]) == 0
    text = capsys.readouterr().out
    assert "out-of-memory killer" in text and "rank 1 on h" in text
    assert "step-00000007 saved" in text and "checkpoints  7" in text
    assert nanoscale(["runs", "show", "a", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["failure"]["signal"] == "SIGKILL" and document["checkpoints"] == [7]


@pytest.fixture
def logged(runs):
    run = runs[0]
    for attempt, word in ((1, "old"), (2, "new")):
        run.attempt_logs(attempt).mkdir()
        for rank in (0, 10, 2):
            run.log(attempt, "h.x", rank, "out").write_text(f"{word} {rank}\n")
        run.log(attempt, "h.x", 2, "err").write_text("trouble")
    return run


def test_logs_carry_host_and_rank_in_the_order_of_ranks(logged, capsys):
    assert nanoscale(["runs", "logs", "b"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "h.x:0 │ new 0",
        "h.x:2 │ new 2",
        "h.x:2 │ trouble",
        "h.x:10 │ new 10",
    ]


def test_logs_of_one_rank_attempt_and_stream(logged, capsys):
    arguments = ["--rank", "2", "--attempt", "1", "--stream", "out"]
    assert nanoscale(["runs", "logs", "b", *arguments]) == 0
    assert capsys.readouterr().out == "h.x:2 │ old 2\n"
    assert nanoscale(["runs", "logs", "b", "--rank", "5"]) == 2
    assert "no such log" in capsys.readouterr().err


def test_following_ends_with_the_run(logged, capsys):
    lock = RunLock(logged)

    def go_on():
        time.sleep(0.3)
        with logged.log(2, "h.x", 0, "out").open("a") as file:
            file.write("later")
        lock.__exit__(None, None, None)

    lock.__enter__()
    writer = threading.Thread(target=go_on)
    writer.start()
    assert nanoscale(["runs", "logs", "b", "--follow", "--rank", "0"]) == 0
    writer.join()
    assert capsys.readouterr().out.splitlines() == ["h.x:0 │ new 0", "h.x:0 │ later"]


@pytest.fixture
def hold():
    holders = []

    def start(run, *words):
        command = [sys.executable, "-c", HOLD, str(run.path), *words]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
        assert process.stdout.readline() == b"held\n"
        holders.append(process)
        return process

    yield start
    for process in holders:
        process.kill()
        process.communicate()


def test_stop_asks_the_launcher_and_waits_for_its_end(runs, hold, capsys):
    launcher = hold(runs[0])
    assert nanoscale(["runs", "stop", "b"]) == 0
    assert launcher.wait() == 75
    assert f"process {launcher.pid}" in capsys.readouterr().err
    assert nanoscale(["runs", "stop", "b"]) == 0
    assert "is not going on" in capsys.readouterr().out


def test_stop_gives_up_after_a_time(runs, hold, capsys):
    launcher = hold(runs[0], "deaf")
    assert nanoscale(["runs", "stop", "b", "--timeout", "0.3"]) == 1
    assert "still going on after 0.3 s" in capsys.readouterr().err
    assert launcher.poll() is None
    launcher.send_signal(signal.SIGKILL)


def test_a_diverged_run_is_shown_as_such(tmp_path, monkeypatch, capsys):
    """Its last figures are null in metrics.jsonl, and no reader may trip over that."""
    monkeypatch.chdir(tmp_path)
    words = ["recipe=debug", "model.layers=1", "optimizer.lr=1e9", "run.name=diverged"]
    assert nanoscale(["train", *words, "--json"]) == 1
    printed = capsys.readouterr()
    document = json.loads(printed.out, parse_constant=lambda word: pytest.fail(word))
    assert document["status"] == "failed"
    assert "the training diverged" in printed.err and "fault in nanoscale" not in printed.err
    assert nanoscale(["runs", "show", "diverged"]) == 0
    assert "not finite" in capsys.readouterr().out
    assert nanoscale(["runs", "ls"]) == 0
