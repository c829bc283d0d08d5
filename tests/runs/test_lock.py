from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nanoscale.errors import UserError
from nanoscale.runs import lock
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.lock import RunLock

HOLD = """
import sys
from pathlib import Path
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.lock import RunLock
with RunLock(RunDirectory(Path(sys.argv[1]))):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def run(tmp_path):
    return RunDirectory.create(tmp_path, "x")


@pytest.fixture
def holder(run):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run.path)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.communicate()


def test_the_second_launcher_is_told_who_holds_the_run(run, holder):
    with pytest.raises(UserError) as error, RunLock(run):
        pass
    assert f"process {holder.pid} of " in str(error.value)
    assert "nanoscale runs stop x" in error.value.violations[0].suggestions
    assert lock.owner(run).pid == holder.pid
    with pytest.raises(UserError, match="is going on"):
        lock.refuse_if_held(run)


def test_a_killed_holder_holds_nothing(run, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert lock.owner(run) is None
    with RunLock(run):
        assert lock.owner(run).pid == os.getpid()
    assert lock.owner(run) is None
    lock.refuse_if_held(run)


def test_looking_at_a_free_lock_is_in_nobodys_way(run, monkeypatch):
    looking = os.open(run.lock, os.O_RDWR | os.O_CREAT)
    fcntl.flock(looking, fcntl.LOCK_SH)
    monkeypatch.setattr(lock.time, "sleep", lambda _: fcntl.flock(looking, fcntl.LOCK_UN))
    with RunLock(run):
        pass
    os.close(looking)


def test_a_launcher_elsewhere_cannot_be_stopped_from_here(run):
    elsewhere = lock.Owner("another-host", 1, "me", 0.0, "nanoscale train")
    with pytest.raises(UserError, match="another-host"):
        lock.require_here(run, elsewhere)
    lock.require_here(run, lock.Owner.me())
