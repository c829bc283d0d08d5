"""Checkpoints in memory on nodes: what is lost with a host is on another one."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

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
from tests.cluster.machines import LIMIT_S
from tests.cluster.nodes import Nodes

IMPATIENT = """
import runpy
from nanoscale.launch.fleet.fleet import Fleet
Fleet.join_every_s = 0.5
runpy.run_module("nanoscale", run_name="__main__")
"""
"""The command, which tries to reach absent hosts often."""
MEMORY = ("checkpoint.memory_every=1", "checkpoint.every=0", "checkpoint.every_minutes=0")


def test_a_job_continues_from_memory_without_a_lost_host(
    nodes: Nodes, tmp_path: Path, one_process: list[float]
) -> None:
    """A rank is killed, then the first host is lost: its shards are in the memory of another one.

    The first host comes back, and joins the two others.
    """
    hosts = hostfile(tmp_path, "n1 slots=1", "n2 slots=1", "n3 slots=1")
    words = ("launcher.max_restarts=2", "launcher.nodes=2:3", "parallel.dp=auto", "zero.stage=1")
    job = ("train", *TINY, *LONG, "launcher.lost_after_s=8", "--hostfile", hosts, *words, *MEMORY)
    launch = Launch(nodes, tmp_path, *job, program=("-c", IMPATIENT))
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
    assert in_use(launch) == ["n2", "n3"]
    back_after(launch, lambda: nodes.power_on("n1"))
    assert in_use(launch) == ["n1", "n2", "n3"]
    (change,), resumed = launch.events("hosts"), launch.events("resumed")[-1]
    assert re.match(
        r"n1 is back: continuing with 3 hosts from step \d+ \(\+\d+ % planned\)", change["message"]
    )
    assert change["step"] == resumed["step"] and "memory" in resumed["message"]
    assert len(launch.events("restart")) == 2
    assert goodput(launch.run).causes["changes of hosts"] < LIMIT_S
    assert not launch.run.checkpoint_steps()
    interrupt(launch)
    launch.must_end(130)
    nothing_left(nodes, LIMIT_S)
    assert not [*Path("/dev/shm").glob("nanoscale-*")]
    assert agrees(launch.losses, one_process)


def in_use(launch: Launch) -> list[str]:
    """Return the hosts of the newest attempt."""
    return [host["host"] for host in read_json(launch.run.launch)["hosts"]]
