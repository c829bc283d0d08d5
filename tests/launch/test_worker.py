from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nanoscale import worker
from nanoscale.processes import lifeline
from nanoscale.processes.proc import is_alive
from nanoscale.runs import failure, rank_context
from tests.support.runs import create_run

ROOT = str(Path(__file__).parents[2])
RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "NANOSCALE_HOST": "h"}


@pytest.fixture
def handlers():
    before = {number: signal.getsignal(number) for number in rank_context.STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", rank_context.STOP_SIGNALS)
def test_a_stop_signal_only_raises_the_flag(handlers, number):
    stop = rank_context.StopFlag()
    stop.listen()
    assert not stop.requested
    os.kill(os.getpid(), number)
    assert stop.requested


def test_a_rank_without_its_configuration_says_so_and_exits_2(tmp_path):
    run = create_run(tmp_path, "x")
    environment = {**os.environ, **RANK, "PYTHONPATH": ROOT, "NANOSCALE_ATTEMPT": "3"}
    command = [sys.executable, "-m", "nanoscale.worker", str(run.path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    said = failure.read_rank_failure(run.rank_failure(3, "h", 0))
    assert said is not None and said.user_error is not None
    assert "config.yaml" in said.message


FILES = """
import resource, sys
from nanoscale import worker
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 4096))
try:
    worker.main(sys.argv[1])
except Exception:
    print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_a_rank_may_open_a_connection_to_each_other_rank(tmp_path):
    run = create_run(tmp_path, "x")
    command = [sys.executable, "-c", FILES, str(run.path)]
    environment = {**os.environ, **RANK, "PYTHONPATH": ROOT}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "4096 4096\n", done.stderr


def test_a_word_too_many_is_a_usage_error(capsys):
    assert worker.command_line(["a", "b"]) == 2
    assert "usage" in capsys.readouterr().err


WATCHES = """
import os, sys, time
from nanoscale.processes.lifeline import die_with
if sys.argv[2] == "polling":
    del os.pidfd_open
die_with(int(sys.argv[1]), group=os.getpid())
print("watching", flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("how", ["pidfd", "polling"])
def test_a_group_dies_with_what_it_watches(how):
    watched = subprocess.Popen(["sleep", "1000"])
    watching = subprocess.Popen(
        [sys.executable, "-c", WATCHES, str(watched.pid), how],
        env={**os.environ, "PYTHONPATH": ROOT},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert watching.stdout.readline() == b"watching\n"
        watched.kill()  # not reaped yet: a zombie counts as ended
        assert watching.wait(10) == -signal.SIGKILL
    finally:
        watched.kill()
        watched.wait()
        watching.kill()
        watching.communicate()


def test_a_process_in_another_group_ends_alone():
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import os; from nanoscale.processes.lifeline import _watch; _watch(2**22, 1)",
        ],
        env={**os.environ, "PYTHONPATH": ROOT},
        timeout=30,
    )
    assert done.returncode == -signal.SIGKILL


def test_waiting_for_a_process_that_is_gone_returns_at_once():
    gone = subprocess.Popen(["true"])
    gone.wait()
    lifeline.wait_until_gone(gone.pid)


def test_without_descriptors_of_processes_the_end_is_seen_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(_: int) -> None:
        raise OSError(errno.ENOSYS, "an old kernel")

    monkeypatch.setattr("os.pidfd_open", missing)
    with subprocess.Popen(["sleep", "0.3"]) as unreaped:
        lifeline.wait_until_gone(unreaped.pid)
        assert not is_alive(unreaped.pid)
