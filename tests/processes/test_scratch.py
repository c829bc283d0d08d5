"""Temporary folders of processes that were killed."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from nanoscale.processes import lifeline, proc, scratch
from nanoscale.processes.messages import MARK

KILLED = """
import os, signal, sys
from nanoscale.processes import scratch
print(scratch.make(sys.argv[1]), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_folder_of_a_process_that_was_killed_is_removed_by_the_next(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    stale = Path(subprocess.run(command, capture_output=True, text=True).stdout.strip())
    semaphore = Path(f"/dev/shm/sem.{stale.name}-abc")
    semaphore.touch()
    foreign = tmp_path / "nanoscale-of-somebody-else"
    foreign.mkdir()
    assert stale.is_dir()
    first = scratch.make(str(tmp_path))
    second = scratch.make(str(tmp_path))
    assert first.is_dir() and second.is_dir() and foreign.is_dir()
    assert not stale.exists() and not semaphore.exists()
    scratch.remove(first)
    assert not first.exists()


def test_a_folder_goes_though_a_rank_still_writes_into_it(tmp_path: Path) -> None:
    """A file that appears after the removal of the files and before the folder's would keep the folder."""
    folder = scratch.make(str(tmp_path))
    rmdir = os.rmdir

    def late(path: Any, **options: Any) -> None:
        with suppress(OSError):
            (folder / "rank-1.failure.json").touch()
        rmdir(path, **options)

    with patch.object(os, "rmdir", late):
        scratch.remove(folder)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_was_not_quite_removed_is_removed_by_the_next(tmp_path: Path) -> None:
    half = tmp_path / "nanoscale-abc.removed"
    (half / "run-1").mkdir(parents=True)
    assert list(tmp_path.iterdir()) == [half]
    folder = scratch.make(str(tmp_path))
    assert list(tmp_path.iterdir()) == [folder]


def test_what_left_its_group_is_found_by_its_mark() -> None:
    mark = uuid.uuid4().hex
    words = ["setsid", "sleep", "1000"]
    process = subprocess.Popen(words, env={MARK: mark, "PATH": "/usr/bin:/bin"})
    assert list(lifeline.marked(mark)) == [process.pid]
    lifeline.end_strays(mark, group=1)
    assert process.wait(60) == -9


def test_the_environment_of_a_process_that_begins_its_program_is_waited_for() -> None:
    """The kernel shows none between the new memory and the new environment, about once in twenty starts."""
    for _ in range(200):
        process = subprocess.Popen(
            ["setsid", "sleep", "1000"], env={MARK: "x", "PATH": "/usr/bin:/bin"}
        )
        found = proc.environment(process.pid)
        process.kill()
        process.wait()
        assert f"{MARK}=x".encode() in found


def test_a_delegated_cgroup_ends_what_has_nothing_of_the_job() -> None:
    mark = uuid.uuid4().hex
    folder = lifeline.create_cgroup(mark)
    if folder is None:
        pytest.skip("needs a delegated cgroup of version 2")
    shell = subprocess.Popen(["sh", "-c", "read _; exec env -i setsid --wait sleep 1000"], stdin=-1)
    assert lifeline.join_cgroup(folder, shell.pid)
    assert shell.stdin is not None
    shell.stdin.write(b"go\n")
    shell.stdin.close()
    assert shell.pid in lifeline.marked(mark)
    lifeline.end_cgroup(folder)
    assert shell.wait(60) == -9
    assert not folder.exists()
