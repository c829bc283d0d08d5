"""The fault table: faults of a training on two nodes, and the user's information after ten seconds.

Every test checks the rule (everything has ended everywhere within 10 s, the first cause is true, the exit code
is right, and the screen shows a diagnosis) and measures one row of docs/faults.md; dev/faults.py writes that
page.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from nanoscale.runs import failure, status
from nanoscale.runs.failure import Failure
from tests.cluster.launches import (
    LONG,
    SOURCE,
    TINY,
    Launch,
    Terminal,
    hostfile,
    interrupt,
    left,
    nothing_left,
)
from tests.cluster.machines import LIMIT_S, wait_until
from tests.cluster.nodes import LOGIN, Nodes
from tests.support.rows import exhaustive

MEASURES = "NANOSCALE_FAULT_ROWS" in os.environ
"""True for `make faults`, on an idle machine, with the limits that the page names. Tests pass on a busy one."""
SILENCE_S, HANG_S, CONNECT_S = (5, 4, 5) if MEASURES else (20, 20, 20)
JOB = (*TINY, *LONG, f"launcher.lost_after_s={SILENCE_S}")
PORT = 29517
PAGE = SOURCE / "docs" / "faults.md"
MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")
LISTEN = f"""
import socket, time
server = socket.create_server(("", {PORT}))
print("listening", flush=True)
time.sleep(1000)
"""

DAEMON = """
import os, subprocess
if "NANOSCALE_JOB" in os.environ:  # a process of the job on a node
    silent = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    subprocess.Popen(["setsid", "--fork", "sleep", "1000"], **silent)
"""
"""The program that every job here starts on its nodes, in sessions of their own: it must end with the job as
well."""

CTRL_C, HANG_UP = "Ctrl-C", "terminal hang-up (SIGHUP)"
LAUNCHER_KILLED = {"ssh": "launcher SIGKILL", "pdsh": "launcher SIGKILL, pdsh"}
FULL_DISK = "full disk in a checkpoint write"
NOT_FINITE, OUT_OF_MEMORY = "NaN loss", "out-of-memory killer"
OTHERS = (CTRL_C, HANG_UP, *LAUNCHER_KILLED.values(), FULL_DISK, NOT_FINITE, OUT_OF_MEMORY)
"""Rows of the page that are not in one of the lists below."""

Strike = Callable[[Launch], None]


@dataclass(frozen=True)
class Row:
    """The measurements of a fault."""

    fault: str
    ended_s: float
    """Seconds from the fault to the end of the command, and of everything else."""
    left: int
    lost_steps: int | None
    """None: there was no step yet."""
    code: int
    shown: str


@pytest.fixture(scope="module")
def rows() -> Iterator[list[Row]]:
    """Collect the rows; they are written to the file NANOSCALE_FAULT_ROWS."""
    found: list[Row] = []
    yield found
    target = os.environ.get("NANOSCALE_FAULT_ROWS")
    if target:
        Path(target).write_text(json.dumps([asdict(row) for row in found], indent=2))


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    return hostfile(tmp_path, "n1 slots=1", "n2 slots=1")


# --- faults of a running training ------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """A fault, and its expected effect."""

    name: str
    strike: Strike
    who: str
    """The first cause, as the screen names it."""
    says: str
    """Pattern of the diagnosis."""
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
    """Return the ssh to n2 on the login node."""
    found = launch.nodes.processes(LOGIN).items()
    (pid,) = [pid for pid, line in found if line.startswith("ssh ") and " n2 " in line]
    return pid


def limit_files(launch: Launch) -> None:
    """Make the next checkpoint of the rank on n2 raise `File too large`; its small files still fit."""
    resource.prlimit(rank(launch), resource.RLIMIT_FSIZE, (1 << 14, 1 << 14))


def stop_rank_kill_agent(launch: Launch) -> None:
    os.kill(rank(launch), signal.SIGSTOP)
    os.kill(agent(launch), signal.SIGKILL)


def power_off(launch: Launch) -> None:
    launch.nodes.power_off("n2")


def partition(launch: Launch) -> None:
    launch.nodes.partition("n2")


SLOW_LIMITS = (f"launcher.collective_timeout_s={HANG_S}", "launcher.lost_after_s=60")
KILLED = "killed from outside .SIGKILL."
AGENT_LOST = "the agent, which supervises the ranks, was lost"
SILENT = f"the host stopped responding: no heartbeat for {SILENCE_S} s"

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
        SLOW_LIMITS,
    ),
    Fault("agent SIGKILL", send(signal.SIGKILL, agent), "agent of n2", AGENT_LOST),
    Fault("agent SIGSTOP", send(signal.SIGSTOP, agent), "agent of n2", SILENT),
    Fault("agent SIGKILL, its rank SIGSTOP", stop_rank_kill_agent, "agent of n2", SILENT),
    Fault("ssh killed", send(signal.SIGKILL, connection), "agent of n2", AGENT_LOST),
    Fault("node power-off", power_off, "agent of n2", SILENT),
    Fault("node power-off, pdsh", power_off, "agent of n2", SILENT, ("launcher.name=pdsh",)),
    Fault("partition", partition, "agent of n2", SILENT),
]


ONE_OF_EACH = (
    "worker SIGKILL",
    "a rank hangs (collective timeout of 4 s)",
    "node power-off",
    "port taken",
    "bad interpreter on one host",
    "host key changed",
)
"""One fault for each way in which the launcher learns of it; `make test-exhaustive` has the others.

tests/launch/test_processes_end.py kills and stops the processes of one host."""


def marked(fault: Fault | Flaw) -> Any:
    marks = [] if fault.name in ONE_OF_EACH else [pytest.mark.exhaustive]
    return pytest.param(fault, id=fault.name, marks=marks)


@pytest.mark.parametrize("fault", [marked(fault) for fault in FAULTS])
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
    (folder / "sitecustomize.py").write_text(DAEMON)
    environment = nodes.pdsh_environment | {"PYTHONPATH": f"{folder}:{SOURCE}"}
    line = ("train", *JOB, "--hostfile", hosts, *words)
    return Launch(nodes, folder, *line, environment=environment, **options)


def measure(launch: Launch, name: str, began: float, code: int) -> Row:
    """Wait for the end of it all. `make faults` judges how long it took, on an idle machine."""
    launch.must_end(code)
    gone = nothing_left(launch.nodes, LIMIT_S)
    return Row(name, gone - began, len(left(launch.nodes)), lost_steps(launch), code, shown(launch))


def lost_steps(launch: Launch) -> int | None:
    """Steps after the newest checkpoint; with one every step, only the one being saved may be lost."""
    if not launch.metrics:
        return None
    lost = launch.metrics[-1]["step"] - max(launch.run.checkpoint_steps())
    assert lost in (0, 1)
    return int(lost)


def shown(launch: Launch) -> str:
    """Return the diagnosis on the screen, without parts that differ between runs."""
    cause = failure.read(launch.run)
    if cause is None:
        return ""
    raised = f" ({cause.message.partition(' (')[0]})" if cause.traceback else ""
    return f"{cause.who}: {cause.diagnosis}{raised}"


def assert_shown(launch: Launch, cause: Failure) -> None:
    assert f"{cause.who} failed" in launch.screen
    assert f"diagnosis  {cause.diagnosis}" in launch.screen


# --- requested ends -------------------------------------------------------------------------------


def test_ctrl_c(nodes: Nodes, tmp_path: Path, hosts: Path, rows: list[Row]) -> None:
    launch = start(nodes, tmp_path, hosts)
    launch.trains(3)
    began = time.monotonic()
    interrupt(launch)
    row = measure(launch, CTRL_C, began, 130)
    assert row.lost_steps == 0
    assert "stopped after" in launch.screen
    rows.append(replace(row, shown="stopped after N steps"))


@pytest.mark.exhaustive
def test_a_terminal_that_hangs_up(
    nodes: Nodes, tmp_path: Path, hosts: Path, rows: list[Row]
) -> None:
    terminal = Terminal(tmp_path / "terminal")
    ends = dict.fromkeys(("stdin", "stdout", "stderr"), terminal.theirs)
    launch = start(nodes, tmp_path, hosts, under=terminal.UNDER, **ends)
    terminal.started()
    launch.trains(3)
    began = time.monotonic()
    terminal.hang_up()
    row = measure(launch, HANG_UP, began, 75)
    assert row.lost_steps == 0
    assert status.read(launch.run).state == "preempted"
    rows.append(replace(row, shown="`runs ls`: preempted"))


@pytest.mark.parametrize(
    ("launcher", "name"),
    [("ssh", LAUNCHER_KILLED["ssh"]), exhaustive("pdsh", LAUNCHER_KILLED["pdsh"])],
)
def test_the_launcher_is_killed(
    nodes: Nodes, tmp_path: Path, hosts: Path, rows: list[Row], launcher: str, name: str
) -> None:
    launch = start(nodes, tmp_path, hosts, f"launcher.name={launcher}")
    launch.trains(3)
    began = time.monotonic()
    launch.process.kill()
    row = measure(launch, name, began, -signal.SIGKILL)
    words = [sys.executable, "-m", "nanoscale", "runs", "ls", "--json"]
    listed = nodes.call(LOGIN, words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(SOURCE)})
    (said,) = [entry["message"] for entry in json.loads(listed.stdout)]
    assert said == "running, then lost"
    rows.append(replace(row, shown=f"`runs ls`: {said}"))


# --- exhausted resources --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "room", [pytest.param(1 << 18, id="checkpoint"), exhaustive(0, name="anything")]
)
def test_a_full_disk(nodes: Nodes, tmp_path: Path, hosts: Path, rows: list[Row], room: int) -> None:
    """The disk has room for a few lines, or not even that: then failure.json does not fit either."""
    root = tmp_path / "small"
    nodes.share_memory(root, "96m")
    seen = nodes.seen_from(LOGIN, root)
    words = (f"run.root={root}", "checkpoint.keep_last=null", "--no-preflight")
    launch = start(nodes, tmp_path, hosts, *words, root=seen)
    launch.trains(3)
    began = time.monotonic()
    fill(seen, room, launch)
    row = measure(launch, FULL_DISK, began, 1)
    assert "diagnosis  the disk is full" in launch.screen, launch.screen
    (who,) = re.findall("^(rank . on n.) failed:", launch.screen, re.MULTILINE)
    if room:
        assert launch.cause.who == who
        rows.append(row)


def fill(folder: Path, room: int, launch: Launch) -> None:
    """Keep about this many bytes free until the job has failed, in spite of checkpoints that are being written.

    A checkpoint that began before may still fit into the room; it is given back, or failure.json would not fit.
    In small pieces: what does not fit is taken for a moment all the same, and let go. A rank whose write failed
    in that moment would find a disk with much room.
    """
    size, piece = 0, 1 << 19
    with (folder / "filler").open("wb") as filler:
        while launch.process.poll() is None:
            missing = room - shutil.disk_usage(folder).free
            if missing > 0:
                size = max(0, size - missing)
                filler.truncate(size)
            elif (piece := min(piece, -missing)) > 0:
                try:
                    os.posix_fallocate(filler.fileno(), size, piece)
                    size += piece
                except OSError:
                    piece //= 2
            else:
                piece = 1 << 19
                time.sleep(0.01)


@pytest.mark.exhaustive
def test_numbers_that_are_none(nodes: Nodes, tmp_path: Path, hosts: Path, rows: list[Row]) -> None:
    launch = start(nodes, tmp_path, hosts, "optimizer.lr=1e30")
    launch.must_end(1)
    *_, last = launch.metrics
    assert None in (last["loss"], last["grad_norm"])
    ended = time.time()
    nothing_left(nodes, LIMIT_S)
    cause = launch.cause
    assert cause.diagnosis.startswith("the training diverged")
    assert_shown(launch, cause)
    lost = last["step"] - max(launch.run.checkpoint_steps())
    rows.append(Row(NOT_FINITE, ended - last["time"], 0, lost, 1, shown(launch)))


@pytest.fixture
def little_memory() -> Iterator[Path]:
    """A control group whose processes the kernel kills for want of memory."""
    group = MEMORY_GROUPS / f"nanoscale-{uuid.uuid4().hex}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(f"{1 << 20}")
    except OSError as error:
        pytest.skip(f"needs a memory controller of control groups, version 1: {error}")
    yield group
    wait_until(lambda: not (group / "cgroup.procs").read_text(), "end of what was in the group")
    group.rmdir()


@pytest.mark.exhaustive
def test_the_out_of_memory_killer(
    nodes: Nodes, tmp_path: Path, hosts: Path, rows: list[Row], little_memory: Path
) -> None:
    launch = start(nodes, tmp_path, hosts)
    launch.trains(3)
    began = time.monotonic()
    (little_memory / "cgroup.procs").write_text(str(rank(launch)))
    row = measure(launch, OUT_OF_MEMORY, began, 1)
    cause = launch.cause
    assert cause.who == "rank 1 on n2"
    assert cause.diagnosis.startswith("the kernel's out-of-memory killer ended it")
    assert_shown(launch, cause)
    rows.append(row)


# --- faults before the start ----------------------------------------------------------------------


@dataclass(frozen=True)
class Flaw:
    """A flaw of the hosts, and the launch's message about it."""

    name: str
    make: Callable[[Nodes, Path], object]
    code: int
    says: str
    words: tuple[str, ...] = ()
    shows_late: bool = False
    """After torch was loaded, when the ranks begin to meet; the time is then taken from there."""


def take_port(nodes: Nodes, _: Path) -> None:
    command = [sys.executable, "-c", LISTEN]
    listener = nodes.run_in("n1", command, stdout=subprocess.PIPE, text=True)
    assert listener.stdout is not None and listener.stdout.readline() == "listening\n"


def change_host_key(nodes: Nodes, _: Path) -> None:
    nodes.change_host_key("n2")


def remove_python(nodes: Nodes, folder: Path) -> None:
    """Write the interpreter of `OWN_PYTHON` on n1 alone."""
    python = nodes.make_private(folder / "own")["n1"] / "python"
    source = Path(__file__).parents[2]
    python.write_text(f'#!/bin/sh\nexec env PYTHONPATH={source} {sys.executable} "$@"\n')
    python.chmod(0o755)


FIXED_PORT = f"launcher.master_port={PORT}"
OWN_PYTHON = "cluster.python={folder}/own/python"
NO_PYTHON = "agent of n2: the Python interpreter does not exist there"
WRONG_KEY = "agent of n2: its ssh host key has changed"
FLAWS = [
    Flaw("port taken", take_port, 2, f"n1: port {PORT} is taken", (FIXED_PORT,)),
    Flaw(
        "port taken, without preflight",
        take_port,
        1,
        "agent of n1: another program uses the port",
        (FIXED_PORT, "--no-preflight"),
        shows_late=True,
    ),
    Flaw("bad interpreter on one host", remove_python, 1, NO_PYTHON, (OWN_PYTHON,)),
    Flaw("bad interpreter, pdsh", remove_python, 1, NO_PYTHON, (OWN_PYTHON, "launcher.name=pdsh")),
    Flaw("host key changed", change_host_key, 1, WRONG_KEY),
    Flaw("host key changed, pdsh", change_host_key, 1, WRONG_KEY, ("launcher.name=pdsh",)),
    Flaw(
        "host unreachable at the start",
        lambda nodes, _: nodes.power_off("n2"),
        1,
        "agent of n2: host unreachable",
        (f"launcher.connect_timeout_s={CONNECT_S}",),
    ),
]


@pytest.mark.parametrize("flaw", [marked(flaw) for flaw in FLAWS])
def test_hosts_that_cannot_do_it(
    nodes: Nodes, tmp_path: Path, hosts: Path, rows: list[Row], flaw: Flaw
) -> None:
    flaw.make(nodes, tmp_path)
    others = left(nodes)
    began = time.time()
    words = [word.replace("{folder}", str(tmp_path)) for word in flaw.words]
    launch = start(nodes, tmp_path, hosts, *words)
    launch.must_end(flaw.code)
    # A process of the test before may still have been ending when `others` was listed.
    wait_until(lambda: left(nodes).keys() <= others.keys(), "end of all else")
    if flaw.shows_late:
        began = launch.cause.time
    took = time.time() - began
    said = shown(launch) or refusal(launch.screen)
    assert said.startswith(flaw.says)
    if flaw.code == 2:
        assert not launch.run.path.exists()
    else:
        assert_shown(launch, launch.cause)
    rows.append(Row(flaw.name, took, 0, None, flaw.code, said))


def refusal(screen: str) -> str:
    """Return the problem in a user's error."""
    return next(line.partition("• ")[2] for line in screen.splitlines() if "• " in line)


# --- the page -------------------------------------------------------------------------------------


def test_the_page_has_every_fault() -> None:
    lines = PAGE.read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("| fault |"))
    table = takewhile(lambda line: line.startswith("|"), lines[start:])
    found = [line.split("|")[1].strip() for line in table if line.startswith("| ")]
    known = [fault.name for fault in FAULTS] + [*OTHERS] + [flaw.name for flaw in FLAWS]
    assert found[1:] == known, "run `make faults`"
