"""The fault table: what befalls a training on two nodes, and what the user has after ten seconds.

Every test holds the law (everything has ended everywhere within 10 s, the first cause is true, the exit code
says so, and the screen shows a diagnosis) and measures a row of docs/faults.md, which scripts/faults.py writes.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from nanoscale.runs import failure
from nanoscale.runs.failure import Failure
from tests.cluster.launches import (
    LONG,
    TINY,
    Launch,
    hostfile,
    left,
    nothing_left,
)
from tests.cluster.nodes import LOGIN, Nodes

LAW_S = 10.0
JOB = (*TINY, *LONG)
PORT = 29517
MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")
LISTEN = f"""
import socket, time
server = socket.create_server(("", {PORT}))
print("listening", flush=True)
time.sleep(1000)
"""

Strike = Callable[[Launch], None]


@dataclass(frozen=True)
class Row:
    """What was measured."""

    fault: str
    ended_s: float
    """from the fault to the end of the command, and of everything else"""
    left: int
    lost_steps: int | None
    """None: there was no step yet"""
    code: int
    shown: str


@pytest.fixture(scope="module")
def rows() -> Iterator[list[Row]]:
    """Gathers the rows; they are written where NANOSCALE_FAULT_ROWS says."""
    found: list[Row] = []
    yield found
    target = os.environ.get("NANOSCALE_FAULT_ROWS")
    if target:
        Path(target).write_text(json.dumps([asdict(row) for row in found], indent=2))


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    return hostfile(tmp_path, "n1 slots=1", "n2 slots=1")


# --- faults of a training that goes on ------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """What is done to it, and what must come of that."""

    name: str
    strike: Strike
    who: str
    """the first cause, as the screen names it"""
    says: str
    """pattern of the diagnosis"""
    words: tuple[str, ...] = ()


def send(number: signal.Signals, whose: Callable[[Launch], int]) -> Strike:
    return lambda launch: os.kill(whose(launch), number)


def rank(launch: Launch) -> int:
    (pid,) = launch.ranks("n2")
    return pid


def agent(launch: Launch) -> int:
    (pid,) = launch.agents("n2")
    return pid


def connection(launch: Launch) -> int:
    """The ssh to n2 on the login node."""
    found = launch.nodes.processes(LOGIN).items()
    (pid,) = [pid for pid, line in found if line.startswith("ssh ") and " n2 " in line]
    return pid


def limit_files(launch: Launch) -> None:
    """The next checkpoint of the rank on n2 raises `File too large`; its few words elsewhere do not."""
    resource.prlimit(rank(launch), resource.RLIMIT_FSIZE, (1 << 14, 1 << 14))


def stop_rank_kill_agent(launch: Launch) -> None:
    os.kill(rank(launch), signal.SIGSTOP)
    os.kill(agent(launch), signal.SIGKILL)


def power_off(launch: Launch) -> None:
    launch.nodes.power_off("n2")


def partition(launch: Launch) -> None:
    launch.nodes.partition("n2")


LONG_PATIENCE = ("launcher.collective_timeout_s=4", "launcher.lost_after_s=60")
KILLED = "killed from outside .SIGKILL."
AGENT_LOST = "the agent, which minds the ranks, was lost"
SILENT = "the host fell silent: nothing was heard of it for 5 s"

FAULTS = [
    Fault("worker SIGKILL", send(signal.SIGKILL, rank), "rank 1 on n2", KILLED),
    Fault(
        "worker SIGSTOP", send(signal.SIGSTOP, rank), "rank 1 on n2", "stopped by a signal .SIGSTOP"
    ),
    Fault("exception in one rank", limit_files, "rank 1 on n2", "the program raised an exception"),
    Fault(
        "a rank hangs (collective timeout of 4 s)",
        send(signal.SIGSTOP, rank),
        "rank 1 on n2",
        "rank 1 did not arrive at a collective operation",
        LONG_PATIENCE,
    ),
    Fault("agent SIGKILL", send(signal.SIGKILL, agent), "agent of n2", AGENT_LOST),
    Fault("agent SIGSTOP", send(signal.SIGSTOP, agent), "agent of n2", SILENT),
    Fault("agent SIGKILL, its rank SIGSTOP", stop_rank_kill_agent, "agent of n2", AGENT_LOST),
    Fault("ssh killed", send(signal.SIGKILL, connection), "agent of n2", AGENT_LOST),
    Fault("node power-off", power_off, "agent of n2", SILENT),
    Fault("node power-off, pdsh", power_off, "agent of n2", SILENT, ("launcher.name=pdsh",)),
    Fault("partition", partition, "agent of n2", SILENT),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_training_that_is_struck(
    nodes: Nodes, tmp_path: Path, hosts: Path, rows: list[Row], fault: Fault
) -> None:
    launch = start(nodes, tmp_path, hosts, *fault.words)
    launch.trains(3)
    began = time.monotonic()
    fault.strike(launch)
    row = measure(launch, fault.name, began, 1)
    cause = launch.cause
    assert cause.who == fault.who
    assert re.search(fault.says, cause.diagnosis)
    assert_shown(launch, cause)
    if fault.strike is partition:
        nodes.heal("n2")
        assert left(nodes) == {}
    rows.append(row)


def start(nodes: Nodes, folder: Path, hosts: Path, *words: object, **options: object) -> Launch:
    environment = nodes.pdsh_environment
    line = ("train", *JOB, "--hostfile", hosts, *words)
    return Launch(nodes, folder, *line, environment=environment, **options)


def measure(launch: Launch, name: str, began: float, code: int) -> Row:
    """Wait for the end of it all, and hold the law about it."""
    launch.must_end(code)
    gone = nothing_left(launch.nodes, max(1.0, began + LAW_S - time.monotonic()))
    took = gone - began
    assert took <= LAW_S, launch.screen
    return Row(name, took, len(left(launch.nodes)), lost_steps(launch), code, shown(launch))


def lost_steps(launch: Launch) -> int | None:
    """Steps after the newest checkpoint; with one every step, only the one being saved may be lost."""
    if not launch.metrics:
        return None
    lost = launch.metrics[-1]["step"] - max(launch.run.checkpoint_steps())
    assert lost in (0, 1)
    return int(lost)


def shown(launch: Launch) -> str:
    """The diagnosis as the screen has it, without what differs from run to run."""
    cause = failure.read(launch.run)
    return f"{cause.who}: {cause.diagnosis}" if cause is not None else ""


def assert_shown(launch: Launch, cause: Failure) -> None:
    assert f"{cause.who} failed" in launch.screen
    assert f"diagnosis  {cause.diagnosis}" in launch.screen
