"""The processes of a job, without a job worth the name."""

from __future__ import annotations

import os
import time

import psutil

from nanoscale.launch.processes import Job


def wait_for(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_orphans_are_ended_and_reaped_where_nobody_else_would(tmp_path):
    """A container's first process often reaps nobody: what the job leaves would stay a zombie."""
    log = tmp_path / "log"
    job = Job(["sh", "-c", "(sleep 300 & echo $!) ; exit 3"], {}, log)
    wait_for(lambda: job.exit_code() is not None and log.read_text().strip())
    orphan = int(log.read_text())
    wait_for(lambda: psutil.Process(orphan).ppid() == os.getpid())
    assert job.exit_code() == 3
    assert job.end() == []
    assert not psutil.pid_exists(orphan) and not psutil.pid_exists(job.pid)
