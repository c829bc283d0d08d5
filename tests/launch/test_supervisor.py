from __future__ import annotations

import os
import signal
import sys

import pytest

from nanoscale.launch.command import HostPlan, LaunchPlan
from nanoscale.launch.processes import Job
from nanoscale.launch.signals import Signals
from nanoscale.launch.supervisor import judge
from nanoscale.runs import failure
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.failure import Evidence, RankFailure

PLAN = LaunchPlan(1, 1, (HostPlan("h", 1, (0,), ("x",)),), "127.0.0.1", 1, {}, ())
INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


@pytest.mark.parametrize(
    ("code", "asked", "forced", "state", "exit_code"),
    [
        (0, None, None, "completed", 0),
        (0, INT, None, "completed", 0),
        (75, INT, None, "stopped", 130),
        (75, TERM, None, "preempted", 75),
        (75, HUP, None, "preempted", 75),
        (75, None, None, "preempted", 75),
        (-TERM, INT, None, "stopped", 130),
        (-TERM, None, None, "failed", 1),
        (-9, INT, "by force", "stopped", 130),
        (-9, TERM, "by force", "failed", 1),
        (1, None, None, "failed", 1),
        (1, TERM, None, "failed", 1),
        (-9, None, None, "failed", 1),
        (None, None, None, "failed", 1),
    ],
)
def test_what_the_agents_end_means(tmp_path, code, asked, forced, state, exit_code):
    run = RunDirectory.create(tmp_path, "x")
    outcome = judge(run, PLAN, code, asked, forced)
    assert (outcome.state, outcome.exit_code) == (state, exit_code)
    assert (outcome.failure is not None) == (state == "failed")
    assert run.failure.exists() == (state == "failed")


def test_what_the_agent_wrote_is_the_failure(tmp_path):
    run = RunDirectory.create(tmp_path, "x")
    raised = RankFailure.of(ValueError("x"), rank=3, local_rank=3, host="h")
    written = failure.digest(run, 1, [raised], Evidence())
    failure.write(run, written)
    assert judge(run, PLAN, 1, None, None).failure == written


def test_signals_are_remembered_and_handlers_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert (signals.first, signals.insists) == (signal.SIGTERM, False)
        os.kill(os.getpid(), signal.SIGINT)
        assert (signals.first, signals.insists) == (signal.SIGTERM, True)
    assert signal.getsignal(signal.SIGTERM) == before


def test_what_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.first is None
    finally:
        signal.signal(signal.SIGHUP, before)


ESCAPES = """
import subprocess, sys
subprocess.Popen(["sleep", "1000"], start_new_session=True)
subprocess.Popen(["sleep", "1000"])
print("ready", flush=True)
sys.exit(3)
"""


def test_a_process_that_left_the_session_is_ended_too(tmp_path):
    job = Job([sys.executable, "-c", ESCAPES], {"MINE": "1"}, tmp_path / "logs" / "log")
    job.wait(30)
    assert job.exit_code() == 3
    assert len(job._members()) == 2
    assert job.end() == []
    assert job._members() == []
    assert (tmp_path / "logs" / "log").read_text() == "ready\n"
