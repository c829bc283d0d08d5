"""Sweeps on a hostfile: several trials at once, each on its own hosts, or one after another on all of them."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from nanoscale.runs import events
from nanoscale.runs.directory import RunDirectory
from nanoscale.sweep.sweep import Sweep
from tests.cluster.launches import TINY, Launch, agrees, hostfile, interrupt, nothing_left
from tests.cluster.machines import LIMIT_S, wait_until
from tests.cluster.nodes import LOGIN, NODES, Nodes

JOB = (*TINY[:-1], "train.log_every=1", "--name", "s")


def runs_of(folder: Path) -> list[RunDirectory]:
    sweep = Sweep(folder / "sweeps" / "s")
    return [sweep.run(trial) for trial in sweep.read()[1]]


def hosts_of(run: RunDirectory) -> list[str]:
    """Return the hosts of the newest attempt."""
    return [host["host"] for host in json.loads(run.launch.read_text())["hosts"]]


def metrics_of(run: RunDirectory) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


def lose(nodes: Nodes, node: str) -> None:
    """Let a host answer no longer, as if a while ago: the login node finds no route to it, in seconds."""
    nodes.partition(node)
    nodes.call(LOGIN, ["ip", "neigh", "flush", "all"])


def outcomes(run: RunDirectory) -> list[str]:
    return [event["outcome"] for event in events.read(run) if event["kind"] == "end"]


@pytest.mark.exhaustive
def test_trials_of_one_host_run_at_once_on_hosts_of_their_own_and_resume(
    nodes: Nodes, tmp_path: Path, one_process: list[float]
) -> None:
    hosts = hostfile(tmp_path, "n1 slots=1", "n2 slots=1")
    words = (*JOB, "train.steps=300", "train.seed=0,1,2", "checkpoint.every=150")
    first = Launch(nodes, tmp_path, "sweep", *words, "--hostfile", hosts, "--num-nodes", "1")
    ranks = []
    for node in ("n1", "n2"):
        (pid,) = wait_until(lambda node=node: first.ranks(node), f"rank on {node}", LIMIT_S)
        os.kill(pid, signal.SIGSTOP)  # no trial completes before Ctrl-C
        ranks.append(pid)
    assert [hosts_of(run) for run in runs_of(tmp_path)[:2]] == [["n1"], ["n2"]]
    interrupt(first)
    for pid in ranks:
        os.kill(pid, signal.SIGCONT)
    first.must_end(130)
    nothing_left(nodes, LIMIT_S)
    assert [run.path.exists() for run in runs_of(tmp_path)] == [True, True, False]

    second = Launch(nodes, tmp_path, "sweep", "--resume", "s")
    second.must_end(0)
    nothing_left(nodes, LIMIT_S)
    runs = runs_of(tmp_path)
    assert all(len(hosts_of(run)) == 1 for run in runs)
    assert [outcomes(run).count("completed") for run in runs] == [1] * 3
    for run in runs:
        assert [record["step"] for record in metrics_of(run)] == list(range(1, 301))
    losses = [record["loss"] for record in metrics_of(runs[0])]
    assert agrees(losses[:120], one_process)


@pytest.mark.exhaustive
def test_trials_of_all_hosts_run_one_after_another_through_pdsh(
    nodes: Nodes, tmp_path: Path, one_process: list[float]
) -> None:
    hosts = hostfile(tmp_path, *(f"{node} slots=1" for node in NODES))
    words = (*JOB, "train.steps=20", "train.seed=0,1", "launcher=pdsh", "--hostfile", hosts)
    launch = Launch(nodes, tmp_path, "sweep", *words, environment=nodes.pdsh_environment)
    launch.must_end(0)
    nothing_left(nodes, LIMIT_S)
    first, second = runs_of(tmp_path)
    assert hosts_of(first) == hosts_of(second) == [*NODES]
    ends = [event["time"] for event in events.read(first) if event["kind"] == "end"]
    assert max(ends) <= min(event["time"] for event in events.read(second))
    assert agrees([record["loss"] for record in metrics_of(first)], one_process)


@pytest.mark.exhaustive
def test_trials_of_a_host_that_does_not_answer_move_to_another(
    nodes: Nodes, tmp_path: Path
) -> None:
    """A sweep without any host that answers names the cause, and is resumed."""
    hosts = hostfile(tmp_path, "n1 slots=1", "n2 slots=1")
    words = (*JOB, "train.steps=5", "train.seed=0,1,2", "launcher.connect_timeout_s=60")
    for node in ("n1", "n2"):
        lose(nodes, node)
    first = Launch(nodes, tmp_path, "sweep", *words, "--hostfile", hosts, "--num-nodes", "1")
    first.must_end(1)
    said = first.screen.partition("seed=0 failed; its output is in")[2]
    assert "agent of n1: host unreachable" in said
    assert "nanoscale sweep --resume s --retry" in said
    runs = runs_of(tmp_path)
    assert [run.path.exists() for run in runs] == [True, True, False]
    nodes.restore()
    lose(nodes, "n2")
    second = Launch(nodes, tmp_path, "sweep", "--resume", "s", "--retry")
    second.must_end(0)
    assert [hosts_of(run) for run in runs] == [["n1"]] * 3
    assert [outcomes(run)[-1] for run in runs] == ["completed"] * 3
    assert runs[1].last_attempt() == 3  # on n2 twice, then on n1
