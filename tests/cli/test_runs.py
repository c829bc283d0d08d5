from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from nanoscale.cli.main import run as nanoscale
from nanoscale.config.composing.compose import compose
from nanoscale.config.composing.frozen import dump
from nanoscale.config.rules import Devices, check
from nanoscale.launch.batch.jobs import Job, in_words, way_on
from nanoscale.launch.batch.system import JobState
from nanoscale.launch.lifecycle.attempt import Outcome
from nanoscale.processes.proc import start_ticks
from nanoscale.runs import events, failure, lock, status, submission, trust
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.failure import Evidence, RankFailure
from nanoscale.runs.lock import RunLock
from nanoscale.runs.submission import Submission
from nanoscale.view.run.outcome_text import print_outcome
from tests.support.runs import create_run

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
from nanoscale.runs.submission import Submission
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
    run = create_run(root, name)
    config = check(composed, Devices("cpu", 2))
    run.config.write_text(dump(config, composed.config))
    trust.sign(run.path, trust.executed(config))
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
        assert (shown["state"], shown["in_progress"]) == ("running", True)


def test_show_tells_what_happened(runs, capsys):
    run = runs[1]
    events.append(run, "checkpoint", "step-00000007 saved")
    (run.checkpoint(7)).mkdir()
    killed = RankFailure("ended", 1, 1, "h", 1.0, exit_code=-9)
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
    assert "is not running" in capsys.readouterr().out


def test_stop_ends_no_process_that_a_forged_lock_names(runs, capsys):
    process = subprocess.Popen(["sleep", "60"])
    try:
        owner = replace(lock.Owner.me(), pid=process.pid, born=start_ticks(process.pid))
        token = runs[0].lock.rename(runs[0].path / "lock.forged")
        token.write_text(json.dumps({"token": token.name, **asdict(owner)}))
        assert nanoscale(["runs", "stop", "b"]) == 0
        assert "is not running" in capsys.readouterr().out
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("state", ["RUNNING", "PENDING"])
def test_stop_ends_no_job_that_a_forged_file_names(runs, tmp_path, monkeypatch, capsys, state):
    programs = tmp_path / "bin"
    programs.mkdir()
    answers = {
        "squeue": f"echo '12|{state}|None|node|N/A|0|'",
        "scancel": f"touch {programs}/called",
    }
    for name, answer in answers.items():
        (programs / name).write_text(f"#!/bin/sh\n{answer}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    submission.write(runs[0], Submission("12", script=str(runs[0].script)))
    runs[0].signature.write_text("0" * 64)
    assert nanoscale(["runs", "stop", "b"]) == 2
    said = capsys.readouterr().err
    assert "was not made by your own runs" in said
    assert (
        "scancel --state=PENDING 12" if state == "PENDING" else "scancel --batch --signal=TERM 12"
    ) in said
    assert not (programs / "called").exists()


def test_stop_gives_up_after_a_time(runs, hold, capsys):
    launcher = hold(runs[0], "deaf")
    assert nanoscale(["runs", "stop", "b", "--timeout", "0.3"]) == 1
    assert "still running after 0.3 s" in capsys.readouterr().err
    assert launcher.poll() is None
    launcher.send_signal(signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_a_diverged_run_is_shown_as_such(tmp_path, monkeypatch, capsys):
    """Its last figures are null in metrics.jsonl, and no reader may trip over that."""
    monkeypatch.chdir(tmp_path)
    words = ["recipe=debug", "model.layers=1", "optimizer.lr=1e9", "run.name=diverged"]
    assert nanoscale(["train", *words, "--json"]) == 1
    printed = capsys.readouterr()
    document = json.loads(printed.out, parse_constant=lambda word: pytest.fail(word))
    assert document["status"] == "failed"
    assert "the training diverged" in printed.err and "internal error" not in printed.err
    assert nanoscale(["runs", "show", "diverged"]) == 0
    assert "not finite" in capsys.readouterr().out
    assert nanoscale(["runs", "ls"]) == 0


# --- runs of SLURM --------------------------------------------------------------------------------


def job(state, problem="", **fields):
    handed = Submission("12", time=100.0, **fields)
    known = state and JobState("12", state, "Resources", "n[1-2]", "2026-11-21 20:13:06", 2)
    return Job(handed, known, problem)


@pytest.mark.parametrize(
    ("state", "in_progress", "known", "words"),
    [
        ("running", True, job("RUNNING"), "running"),
        ("prepared", False, job("PENDING"), "queued (job 12)"),
        ("preempted", False, job("PENDING"), "queued (job 12)"),
        ("prepared", False, job("CONFIGURING"), "starting (job 12)"),
        ("prepared", False, job("CANCELLED"), "never began (job 12: cancelled)"),
        ("prepared", False, job(None), "never began (job 12: gone)"),
        ("prepared", False, job(None, cancelled=3.0), "never began (job 12: cancelled)"),
        ("prepared", False, job(None, problem="no squeue"), "prepared"),
        ("running", False, job("NODE_FAIL"), "running, then its node failed (job 12)"),
        ("starting", False, job("FAILED"), "starting, then failed (job 12)"),
        ("running", False, job("RUNNING"), "running, then lost"),
        ("running", False, None, "running, then lost"),
        ("completed", False, job("COMPLETED"), "completed"),
        ("preempted", False, job("FAILED"), "preempted"),
    ],
)
def test_where_a_run_of_slurm_stands(state, in_progress, known, words):
    assert in_words(state, in_progress, known) == words


def test_all_of_a_job_in_one_line():
    assert "job 12: PENDING (Resources), queued since" in job("PENDING").sentence()
    assert "expected to start at 2026-11-21 20:13:06, queued again 2×" in job("PENDING").sentence()
    assert "on n[1-2] since 2026-11-21 20:13:06" in job("RUNNING").sentence()
    assert "no longer knows it" in job(None).sentence()
    assert "removed from the queue" in job(None, cancelled=3.0).sentence()
    assert "cannot be asked here: no squeue" in job(None, problem="no squeue").sentence()


def test_without_slurm_a_submitted_run_is_still_shown(runs, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    ended = status.read(runs[0]).ended
    assert ended is not None
    submission.write(runs[0], Submission("12", script=str(runs[0].script), time=ended - 1))
    assert nanoscale(["runs", "show", "b"]) == 0
    assert "job 12: SLURM cannot be asked here: there is no squeue here" in capsys.readouterr().out
    assert nanoscale(["runs", "ls", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)[0]
    assert (row["job"]["job"], row["job"]["problem"]) == ("12", None)  # it is completed anyway
    status.write(runs[0], status.prepared())
    assert nanoscale(["runs", "ls", "--json"]) == 0
    (row,) = [row for row in json.loads(capsys.readouterr().out) if row["job"]]
    assert (row["job"]["job"], row["job"]["problem"]) == ("12", "there is no squeue here")


def test_what_the_batch_script_printed(runs, capsys, tmp_path):
    run = runs[0]
    assert nanoscale(["runs", "logs", "b", "--batch"]) == 2
    assert "batch script" in capsys.readouterr().err
    submission.write(run, Submission("12", script=str(run.script)))
    (run.logs / "slurm-12.out").write_text("from the batch script")
    assert nanoscale(["runs", "logs", "b"]) == 2
    assert "runs logs b --batch" in capsys.readouterr().err
    assert nanoscale(["runs", "logs", "b", "--batch"]) == 0
    assert capsys.readouterr().out == "from the batch script\n"
    folder = tmp_path / "many.array"
    folder.mkdir()
    (folder / "slurm-12_1.out").write_text("from its task\n")
    submission.write(run, Submission("12", 1, str(folder / "submit.sbatch")))
    assert nanoscale(["runs", "logs", "b", "--batch"]) == 0
    assert capsys.readouterr().out == "from its task\n"


def test_how_to_go_on(runs):
    assert way_on(runs[0]) == "nanoscale resume b"
    submission.write(runs[0], Submission("12", 3, "/a b/submit.sbatch"))
    assert way_on(runs[0]) == "nanoscale submit --resume b"


def test_the_step_reached_and_the_step_of_the_loss(runs, capsys):
    run = make(runs[0].path.parent, "far", "failed", 300.0)
    run.metrics.write_text('{"step": 10, "loss": 3.5}\n')
    events.append(run, "end", "failed", step=17)
    assert nanoscale(["runs", "ls", "--json", "--where", "name=far"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["step"], row["loss"]) == (17, 3.5)
    text = io.StringIO()
    print_outcome(run, Outcome("failed", 1), text)
    assert "after 17 steps" in text.getvalue() and "loss 3.5000 at step 10" in text.getvalue()


def test_an_end_without_a_checkpoint_does_not_promise_to_go_on(runs):
    before = io.StringIO()
    print_outcome(runs[0], Outcome("stopped", 130), before)
    assert (
        "checkpoint  none was saved: the training would start again from step 1"
        in before.getvalue()
    )
    assert "start over  nanoscale resume b" in before.getvalue()
    for saved in (runs[0].memory, runs[0].checkpoint(3)):
        (saved / "1-0-0-0.json").mkdir(parents=True)
        after = io.StringIO()
        print_outcome(runs[0], Outcome("stopped", 130), after)
        assert "continue    nanoscale resume b" in after.getvalue()
        assert "step 1" not in after.getvalue()
        shutil.rmtree(saved)


# --- watching -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def in_progress(tmp_path_factory):
    """A real run that continues until it is stopped, and its folder."""
    folder = tmp_path_factory.mktemp("watched")
    words = ["recipe=debug", "model.layers=1", "train.steps=100000", "run.name=w"]
    command = [sys.executable, "-m", "nanoscale", "train", *words, "launcher.threads=1"]
    with (folder / "screen").open("wb") as screen:
        train = subprocess.Popen(command, cwd=folder, env=SOURCES, stdout=screen, stderr=screen)
    run = RunDirectory(folder / "runs" / "w")
    wait_for(lambda: run.metrics.exists() and run.metrics.read_text().count("\n") > 3)
    yield train, run
    train.kill()
    train.wait()


SOURCES = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
LIMIT_S = 90


def wait_for(condition):
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def watch(run, screen, *words):
    command = [sys.executable, "-m", "nanoscale", "runs", "watch", str(run.path), *words]
    with screen.open("w") as output:
        return subprocess.Popen(command, env=SOURCES, stdout=output, stderr=output)


@pytest.mark.slow
def test_watching_joins_a_run_and_ctrl_c_ends_the_watching_only(in_progress, tmp_path):
    train, run = in_progress
    screen = tmp_path / "watched"
    watcher = watch(run, screen)
    wait_for(lambda: screen.read_text().count("\nstep ") > 1)
    lines = screen.read_text().splitlines()
    assert lines[0].startswith("watching 1 rank on") and "training from step 1" in lines
    first = next(line for line in lines if line.startswith("step "))
    assert int(first.split()[1].partition("/")[0]) > 3  # earlier steps are in metrics.jsonl
    watcher.send_signal(signal.SIGINT)
    assert watcher.wait(LIMIT_S) == 130
    assert "w continues" in screen.read_text()
    assert train.poll() is None


@pytest.mark.slow
def test_watching_ends_with_the_run_and_its_exit_code(in_progress, tmp_path, capsys):
    train, run = in_progress
    screen = tmp_path / "watched"
    watcher = watch(run, screen)
    wait_for(lambda: "\nstep " in screen.read_text())
    assert nanoscale(["runs", "stop", str(run.path)]) == 0
    assert watcher.wait(LIMIT_S) == train.wait(LIMIT_S) == 130
    assert "SIGTERM: stopping" in screen.read_text()
    assert "stopped after" in screen.read_text()
    assert status.read(run).state == "stopped"
    assert f"{run.name} is stopped" in capsys.readouterr().out


def test_a_run_that_has_ended_is_summed_up(runs, capsys):
    assert nanoscale(["runs", "watch", "b", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["status"], document["exit_code"]) == ("completed", 0)
    status.write(runs[0], status.read(runs[0]).starting(2).running())
    assert nanoscale(["runs", "watch", "b"]) == 1
    assert "running, then lost" in capsys.readouterr().out
