"""The cleanup after a lost agent on its host, here without an agent."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from pathlib import Path

from nanoscale.processes.lifeline import end_orphans
from nanoscale.processes.messages import MARK

LEADER = f"""
{MARK}=$0 sleep 1000 & echo $!
{MARK}=$0 setsid sleep 1000 & echo $!
wait
"""


def is_gone(pid: int) -> bool:
    """True if a process has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X")
    except OSError:
        return True


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)


def leader(mark: str) -> tuple[subprocess.Popen[str], list[int]]:
    """Start the leader of a group like an agent, without the mark; its children have it, in any group."""
    process = subprocess.Popen(
        ["sh", "-c", LEADER, mark], stdout=subprocess.PIPE, text=True, process_group=0
    )
    assert process.stdout is not None
    children = [int(process.stdout.readline()) for _ in range(2)]
    for pid in children:  # the shell prints their ids before they run their programs
        while b"sleep" not in Path(f"/proc/{pid}/comm").read_bytes():
            time.sleep(0.01)
    return process, children


def test_all_that_carries_the_mark_ends_and_its_agent_too_though_stopped() -> None:
    mark, other_mark = uuid.uuid4().hex, uuid.uuid4().hex
    (agent, ranks), (other, others) = leader(mark), leader(other_mark)
    try:
        for pid in (agent.pid, *ranks):
            stop(pid)
        assert end_orphans(mark) == []
        assert agent.wait(60) == -signal.SIGKILL
        assert all(map(is_gone, ranks))
        assert other.poll() is None and not any(map(is_gone, others))
    finally:
        for pid in (other.pid, *others):  # a shell whose children died first would end by itself
            stop(pid)
        assert end_orphans(other_mark) == []
    assert all(map(is_gone, others)) and other.wait(60) == -signal.SIGKILL


def test_where_nothing_is_left_nothing_is_ended() -> None:
    assert end_orphans(uuid.uuid4().hex) == []
