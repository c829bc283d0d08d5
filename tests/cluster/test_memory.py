"""Checkpoints in memory on nodes: what is lost with a host is on another one."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from nanoscale.runs.directory import read_json
from nanoscale.runs.goodput import goodput
from tests.cluster.launches import (
    LONG,
    TINY,
    Launch,
    agrees,
    back_after,
    hostfile,
    interrupt,
    nothing_left,
)
from tests.cluster.machines import LIMIT_S, wait_until
from tests.cluster.nodes import Nodes
from tests.support.rows import exhaustive

IMPATIENT = """
import runpy
from nanoscale.launch.fleet.fleet import Fleet
Fleet.join_every_s = 0.5
runpy.run_module("nanoscale", run_name="__main__")
"""
"""The command, which tries to reach absent hosts often."""
HOOKS = """
import socket, time
from torch.nn import functional as F

def loss(logits, targets, config):
    time.sleep(0.12 if socket.gethostname() == "n3" else 0.03)
    return F.cross_entropy(logits, targets, reduction="none")
"""
"""The usual loss, for which n3 needs four times as long."""
MEMORY = ("checkpoint.memory_every=1", "checkpoint.every=0", "checkpoint.every_minutes=0")


def test_a_job_continues_from_memory_without_lost_and_slow_hosts(
    nodes: Nodes, tmp_path: Path, one_process: list[float]
) -> None:
    """A rank is killed, then the first of two hosts is lost: its shards are in the memory of the other one.

    The spare host joins. It is slow, so it is left out, and the first host comes back in its place.
    """
    (tmp_path / "hooks.py").write_text(HOOKS)
    hosts = hostfile(tmp_path, "n1 slots=1", "n2 slots=1", "n3 slots=1")
    words = ("launcher.max_restarts=2", "launcher.nodes=1:2", "parallel.dp=auto", "zero.stage=1")
    slow = ("launcher.exclude_stragglers=1.3", "train.objective=hooks", "hooks.path=hooks.py")
    job = ("train", *TINY, *LONG, "launcher.lost_after_s=8", "--hostfile", hosts, *words, *MEMORY)
    launch = Launch(nodes, tmp_path, *job, *slow, program=("-c", IMPATIENT))
    launch.trains(3)
    for strike in (
        lambda: os.kill(launch.only_rank("n2"), signal.SIGKILL),
        lambda: nodes.power_off("n1"),
    ):
        reached = launch.metrics[-1]["step"]
        back_after(launch, strike)
        resumed = launch.events("resumed")[-1]
        assert resumed["step"] >= reached - 1
        assert "memory" in resumed["message"]
    wait_until(lambda: in_use(launch) == ["n2", "n3"], "the spare host", LIMIT_S)
    back_after(launch, lambda: nodes.power_on("n1"))

    def is_replaced() -> bool:
        attempts = 3 + len(launch.events("hosts"))
        trains = len(launch.events("running")) == attempts >= 5
        return trains and in_use(launch) == ["n1", "n2"]

    wait_until(is_replaced, "n1 in the place of n3", LIMIT_S)
    changes, (left_out,) = launch.events("hosts"), launch.events("left out")
    text = r"(n\d [a-z ]+): continuing with [12] hosts? from step \d+ \(\+\d+% planned\)"
    found = [match and match[1] for it in changes for match in [re.fullmatch(text, it["message"])]]
    assert found[:2] == ["n3 joins", "n3 is slow"]
    assert found[2:] in ([], ["n1 is back"])  # it may be connected before n3 is found to be slow
    assert [it["step"] for it in launch.events("resumed")[2:]] == [it["step"] for it in changes]
    assert left_out["host"] == "n3"
    assert all("memory" in it["message"] for it in launch.events("resumed"))
    assert len(launch.events("restart")) == 2
    assert goodput(launch.run).causes["changes of hosts"] < LIMIT_S
    assert not launch.run.checkpoint_steps()
    interrupt(launch)
    launch.must_end(130)
    nothing_left(nodes, LIMIT_S)
    assert not [*Path("/dev/shm").glob("nanoscale-*")]
    assert agrees(launch.losses, one_process)


@pytest.mark.parametrize("cut", [pytest.param("", id="n2 off"), exhaustive("n3", name="n3 too")])
def test_a_fixed_job_waits_for_hosts_that_stay_away(
    nodes: Nodes, tmp_path: Path, one_process: list[float], cut: str
) -> None:
    """n2 is off for longer than ssh waits for it, until an attempt without it has failed.

    n3, which keeps the copies of n2, may be cut off while n2 is reached: its agent copies them to the disk.
    """
    hosts = hostfile(tmp_path, "n1 slots=1", "n2 slots=1", "n3 slots=1")
    limits = ("launcher.lost_after_s=5", "launcher.ssh_args=['-oConnectTimeout=2']")
    words = (*TINY, *LONG, *MEMORY, *limits, "zero.stage=1", "launcher.max_restarts=99")
    launch = Launch(nodes, tmp_path, "train", *words, "--hostfile", hosts)
    launch.trains(3)

    def stay_away() -> None:
        nodes.power_off("n2")
        wait_until(lambda: unreached(launch, "n2"), "attempt without n2", LIMIT_S)
        if cut:
            nodes.partition(cut)
            wait_until(lambda: not launch.agents(cut), f"end of the agent of {cut}", LIMIT_S)
            nodes.heal(cut)
        nodes.power_on("n2")

    reached = launch.metrics[-1]["step"]
    back_after(launch, stay_away)
    (resumed,) = launch.events("resumed")
    assert resumed["step"] >= reached - 1 and "memory" in resumed["message"]
    interrupt(launch)
    launch.must_end(130)
    nothing_left(nodes, LIMIT_S)
    assert [it["step"] for it in launch.metrics] == [*range(1, len(launch.losses) + 1)]
    assert agrees(launch.losses, one_process)


def unreached(launch: Launch, host: str) -> bool:
    """True if a lost host was the cause of a further attempt's failure."""
    assert launch.process.poll() is None, f"it ended:\n{launch.screen}"
    return [it["host"] for it in launch.events("restart")].count(host) > 1


def in_use(launch: Launch) -> list[str]:
    """Return the hosts of the newest attempt."""
    return [host["host"] for host in read_json(launch.run.launch)["hosts"]]
