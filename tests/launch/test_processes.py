"""The processes of a job, without a job worth the name."""

from __future__ import annotations

import errno
import math
import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from nanoscale.common.devices import Devices
from nanoscale.common.errors import UserError
from nanoscale.config.machines import Host
from nanoscale.config.rules import check
from nanoscale.launch.fleet.fleet import Fleet
from nanoscale.launch.fleet.processes import Process, adopt_orphans, end_all, members
from nanoscale.launch.lifecycle.command import local_host
from nanoscale.launch.transport.transport import Ssh
from nanoscale.processes.messages import MARK
from tests.support.recipes import changed

ESCAPES = """
import subprocess, sys
subprocess.Popen(["sleep", "1000"], start_new_session=True)
subprocess.Popen(["sleep", "1000"])
print("ready", flush=True)
sys.exit(3)
"""


def wait_for(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_orphans_are_ended_and_reaped_where_nobody_else_would():
    """A container's first process often reaps no orphans: the job's would stay zombies."""
    adopt_orphans()
    try:
        process = Process(["sh", "-c", "(sleep 300 & echo $!) ; exit 3"], {})
        orphan = int(process.stdout.readline())
        wait_for(lambda: process.exit_code() is not None)
        wait_for(lambda: psutil.Process(orphan).ppid() == os.getpid())
    finally:
        adopt_orphans(False)
    assert process.exit_code() == 3
    assert end_all([process.pid], "no mark") == []
    process.reap()
    assert not psutil.pid_exists(orphan) and not psutil.pid_exists(process.pid)


def test_a_process_that_left_the_session_is_ended_too():
    process = Process([sys.executable, "-c", ESCAPES], {MARK: "mine"})
    assert process.stdout.readline() == b"ready\n"
    wait_for(lambda: process.exit_code() == 3)
    assert len(members([process.pid], "mine")) == 2
    assert end_all([process.pid], "mine") == []
    assert members([process.pid], "mine") == []
    process.reap()


def test_another_jobs_processes_are_left_alone():
    mine, other = (Process(["sleep", "1000"], {MARK: mark}) for mark in ("mine", "other"))
    try:
        assert end_all([mine.pid], "mine") == []
        assert mine.exit_code() == -9
        assert other.exit_code() is None
    finally:
        other.kill()
        mine.reap()
        other.reap()


def test_the_agent_ends_if_the_launcher_is_interrupted_while_it_waits_for_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = check(changed("run.root=" + str(tmp_path)), Devices("cpu", 1))
    fleet = Fleet(config, [local_host(1)], tmp_path)

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fleet, "_quit_agents", interrupt)
    with pytest.raises(KeyboardInterrupt), fleet:
        agent = fleet.members[0].process
    assert agent is not None and not psutil.pid_exists(agent.pid)


def test_repeated_attempts_to_reach_a_host_keep_no_descriptors_and_say_what_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text("n1 slots=1")
    composed = changed("launcher=ssh", "launcher.hostfile=hosts", "launcher.device=cpu")
    config = check(composed, Devices("cpu", 2), (Host("n1", 1),))
    away = [sys.executable, "-c", "import sys; sys.exit('ssh: connect to host n1: timed out')"]
    monkeypatch.setattr(Ssh, "commands", lambda *_: [tuple(away)])
    monkeypatch.setattr(Ssh, "cleanup_command", lambda *_: None)
    said: list[str] = []
    others = {it.pid for it in psutil.Process().children(recursive=True)}  # end when they like

    def descriptors_and_children() -> tuple[int, int]:
        children = {it.pid for it in psutil.Process().children()} - others
        return len([*Path("/proc/self/fd").iterdir()]), len(children)

    def try_again() -> None:
        fleet.join(fleet.members, 0.0)
        while fleet.members[0].is_present:
            fleet.poll(0.05)

    with Fleet(config, [Host("n1", 1)], tmp_path) as fleet:
        fleet.report = said.append
        while fleet.members[0].is_present:
            fleet.poll(0.05)
        try_again()
        before = descriptors_and_children()
        for _ in range(4):
            try_again()
        assert descriptors_and_children() == before and not said
        assert "suspended" not in str(fleet.members[0].lost)
        fleet.join(fleet.members, 0.0)
        fleet._last_check -= 60.0  # as if this process had been stopped
        while fleet.members[0].is_present:
            fleet.poll(0.05)
        assert "the launcher was suspended for more than 5 s" in fleet.members[0].lost.diagnosis
        fleet._suspended = -math.inf

        def none_left(*_: object, **__: object) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

        for function in ("subprocess.Popen", "os.open"):
            with monkeypatch.context() as patch:
                patch.setattr(function, none_left)
                try_again()
                try_again()
        assert len(said) == 2
        assert all(
            "Too many open files; raise the limit of open files: ulimit" in it for it in said
        )


def test_hosts_need_a_folder_of_runs_that_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=1")
    words = ["launcher=ssh", f"launcher.hostfile={hosts}", "parallel.dp=1"]
    config = check(changed(*words), Devices("cpu", 1), (Host("localhost", 1),))
    with pytest.raises(UserError, match="no run can be created"):
        Fleet(config, [Host("localhost", 1)], tmp_path / "file" / "runs").__enter__()
