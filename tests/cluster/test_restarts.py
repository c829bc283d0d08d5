"""launcher.max_restarts on nodes: trainings resume by themselves, with the remaining hosts, a limited number
of times."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from nanoscale.runs.directory import read_json
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


def steps(launch: Launch) -> list[int]:
    return [record["step"] for record in launch.metrics]


def test_a_killed_worker_is_back_but_not_for_ever(nodes: Nodes, tmp_path: Path) -> None:
    hosts = hostfile(tmp_path, "n1 slots=1", "n2 slots=1")
    words = ("train", *TINY, *LONG, "--hostfile", hosts, "launcher.max_restarts=2")
    launch = Launch(nodes, tmp_path, *words)
    launch.trains(3)
    for node in ("n2", "n1"):
        reached = steps(launch)[-1]
        back_after(launch, lambda node=node: os.kill(launch.only_rank(node), signal.SIGKILL))
        assert launch.events("resumed")[-1]["step"] >= reached - 1
    os.kill(launch.only_rank("n2"), signal.SIGKILL)
    launch.must_end(1)
    nothing_left(nodes, LIMIT_S)
    assert steps(launch) == list(range(1, len(launch.metrics) + 1))  # no repeats, no gaps
    cause = launch.cause
    assert (cause.attempt, cause.who) == (3, "rank 1 on n2")
    first, second = (read_json(launch.run.attempt_logs(n) / "failure.json") for n in (1, 2))
    assert (first["rank"], second["rank"]) == (1, 0)
    assert len(launch.events("restart")) == 2


def test_an_elastic_job_goes_on_with_the_hosts_that_are_there(
    nodes: Nodes, tmp_path: Path, one_process: list[float]
) -> None:
    """The first host, with the rendezvous and the metrics' writer, is lost; later it returns."""
    hosts = hostfile(tmp_path, "n1 slots=1", "n2 slots=1", "n3 slots=1")
    words = ("launcher.max_restarts=2", "launcher.nodes=2:3", "parallel.dp=auto")
    launch = Launch(nodes, tmp_path, "train", *TINY, *LONG, "--hostfile", hosts, *words)
    launch.trains(3)
    back_after(launch, lambda: nodes.power_off("n1"))
    assert hosts_of(launch) == ["n2", "n3"]
    assert read_json(launch.run.launch)["world_size"] == 2
    nodes.power_on("n1")
    back_after(launch, lambda: os.kill(launch.only_rank("n3"), signal.SIGKILL))
    wait_until(lambda: hosts_of(launch) == ["n1", "n2", "n3"], "return of n1", LIMIT_S)
    wait_until(lambda: len(launch.ranks("n1")) == 1, "rank on n1", LIMIT_S)
    interrupt(launch)
    launch.must_end(130)
    nothing_left(nodes, LIMIT_S)
    assert agrees(launch.losses, one_process)


def hosts_of(launch: Launch) -> list[str]:
    return [host["host"] for host in read_json(launch.run.launch)["hosts"]]
