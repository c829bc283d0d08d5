"""One launcher and one attempt hold a run, on whatever nodes and at whatever time others come."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from nanoscale.checkpoint import store
from nanoscale.runs import events, metrics, status
from nanoscale.runs.directory import RunDirectory
from tests.cluster.machines import LIMIT_S, wait_until
from tests.cluster.nodes import LOGIN, NODES, Nodes

SOURCE = Path(__file__).parents[2]
PUBLISHER = Path(__file__).with_name("slow_publisher.py")
NANOSCALE = (sys.executable, "-m", "nanoscale")
FENCED = "the run has continued without this rank (attempt 2 is running)"
JOB = (
    "train",
    "recipe=debug",
    "--hostfile=hostfile",
    "launcher.device=cpu",
    "launcher.threads=1",
    "train.steps=100000",
    "train.global_batch=6",
    "run.name=r",
)


def start(nodes: Nodes, node: str, folder: Path, *words: object) -> subprocess.Popen[str]:
    """Start a command without waiting for its end."""
    return nodes.run_in(
        node,
        words,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str], code: int) -> str:
    """Return its output once it has ended with the expected code."""
    said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == code, said
    return said


def run_of(folder: Path, hosts: Sequence[str] = NODES) -> RunDirectory:
    (folder / "hostfile").write_text("".join(f"{host} slots=1\n" for host in hosts))
    return RunDirectory(folder / "runs" / "r")


def attempts(run: RunDirectory) -> dict[int, int]:
    """Return the attempt that saved the checkpoint of each step."""
    stored = store.list_checkpoints(run.checkpoints)
    return {checkpoint.step: checkpoint.manifest["attempt"] for checkpoint in stored}


def until(condition: Callable[[], Any], what: str) -> None:
    wait_until(condition, what, LIMIT_S)


def test_a_second_launcher_on_another_node(nodes: Nodes, tmp_path: Path) -> None:
    """It is refused while the run continues, and gets it a few seconds after the first was killed."""
    run = run_of(tmp_path, ["n1"])
    words = [*JOB, "checkpoint.every=5", "checkpoint.keep_last=2"]
    first = start(nodes, LOGIN, tmp_path, *NANOSCALE, *words)
    until(lambda: run.checkpoint_steps() or first.poll() is not None, "checkpoint")
    before = run.status.read_bytes()
    refused = finish(start(nodes, "n2", tmp_path, *NANOSCALE, "resume", "r"), 2)
    assert f"process {inner_pid(first.pid)} of" in refused and "on login since" in refused
    assert run.status.read_bytes() == before and first.poll() is None

    first.kill()
    second = start(nodes, "n2", tmp_path, *NANOSCALE, "resume", "r")
    until(lambda: status.read(run).attempt == 2 or second.poll() is not None, "attempt 2")
    until(lambda: status.read(run).state == "running" or second.poll() is not None, "training")
    second.send_signal(signal.SIGINT)
    said = finish(second, 130)
    assert f"held by process {inner_pid_of(refused)} of" in said and "waiting up to 9 s" in said
    assert events.last(run, "resumed") is not None


def inner_pid(pid: int) -> int:
    """Return a process's own pid in its node's namespace."""
    (line,) = [
        line
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("NSpid:")
    ]
    return int(line.split()[-1])


def inner_pid_of(refused: str) -> str:
    return refused.partition("process ")[2].partition(" ")[0]


def test_a_node_that_comes_back_publishes_nothing(nodes: Nodes, tmp_path: Path) -> None:
    run = run_of(tmp_path)
    words = [*JOB, "launcher.nodes=2:3", "launcher.max_restarts=1"]
    launcher = start(nodes, LOGIN, tmp_path, sys.executable, PUBLISHER, "launch", *words)

    def appears(name: str) -> None:
        until(lambda: (run.path / name).exists() or launcher.poll() is not None, name)
        assert launcher.poll() is None, launcher.communicate()[0]

    appears("written")
    suspended = sorted(nodes.processes("n1"))
    number = int((run.path / "written").read_text())
    (rank,) = [pid for pid in suspended if inner_pid(pid) == number]
    send(suspended, signal.SIGSTOP)
    nodes.partition("n1")
    until(lambda: max(attempts(run)) > 10 or launcher.poll() is not None, "checkpoint without n1")
    assert 3 not in attempts(run)

    nodes.heal("n1")
    (run.path / "go").touch()
    send([rank], signal.SIGCONT)  # before its agent, which would end it
    appears("said")
    assert (run.path / "said").read_text().splitlines() == [FENCED] * 5
    send(suspended, signal.SIGCONT)
    until(lambda: not nodes.processes("n1"), "end of what was on n1")

    (run.path / "enough").touch()
    finish(launcher, 0)
    finish(start(nodes, "n3", tmp_path, *NANOSCALE, "checkpoints", "verify", "r"), 0)
    saved = attempts(run)
    assert saved == {1: 1, 2: 1} | dict.fromkeys(range(12, max(saved) + 1, 10), 2)
    assert run.latest.resolve() == run.checkpoint(max(saved)).resolve()
    assert [record["step"] for record in metrics.read(run)] == sorted(saved)
    assert events.last(run, "late") is None
    assert not [path for path in run.checkpoints.iterdir() if path.name.startswith(".")]
    assert json.loads(run.launch.read_text())["world_size"] == 2
    until(lambda: not any(map(nodes.processes, nodes.names)), "end of all processes")


def send(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # a rank's own children die with it
            os.kill(pid, number)
