"""The command `nanoscale` at the login node, and everything that is visible of it from outside."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from nanoscale.runs import events, failure, status
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.failure import Failure
from tests.cluster.machines import LIMIT_S, wait_until
from tests.cluster.nodes import LOGIN, Nodes

SOURCE = Path(__file__).parents[2]
FP32 = 1e-6
"""The largest relative difference between losses of the same job in fp32.

At this learning rate 2e-7 was seen. At 3e-3, training itself makes a difference grow a hundredfold
in 100 steps.
"""
TINY = (
    "recipe=debug",
    "model.layers=2",
    "scheduler=constant",
    "optimizer.lr=1e-3",
    "train.global_batch=6",
    "launcher.device=cpu",
    "launcher.threads=1",
    "train.sample_tokens=0",
    "launcher.lost_after_s=20",
    "run.name=r",
)
"""A job of a few milliseconds a step, which every number of ranks up to 3 divides."""
LONG = ("train.steps=100000", "checkpoint.every=1")
"""A job whose end no test waits for."""


class Launch:
    """A running command. Its run, if it has one, is `r` in `root`.

    Args:
        words: the arguments of `nanoscale`.
        under: a command that it is started through.
        program: the arguments of Python before `words`.
    """

    def __init__(
        self,
        nodes: Nodes,
        folder: Path,
        *words: object,
        root: Path | None = None,
        environment: Mapping[str, str] | None = None,
        under: Sequence[str] = (),
        program: Sequence[str] = ("-m", "nanoscale"),
        **options: Any,
    ) -> None:
        self.nodes = nodes
        self.run = RunDirectory((root or folder / "runs") / "r")
        self._screen = folder / f"screen-{time.monotonic_ns()}"
        command = [*under, sys.executable, *program, *words]
        with self._screen.open("wb") as screen:
            self.process = nodes.run_in(
                LOGIN,
                command,
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(SOURCE), **(environment or {})},
                **({"stdout": screen, "stderr": screen} | options),
            )

    @property
    def screen(self) -> str:
        """The output that the user has seen so far."""
        return self._screen.read_text(errors="replace")

    def ends(self, limit_s: float = LIMIT_S) -> int:
        """Wait for the end of the command; its exit code."""
        try:
            return int(self.process.wait(limit_s))
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"still running after {limit_s:g} s:\n{self.screen}") from error

    def must_end(self, code: int) -> None:
        found = self.ends()
        assert found == code, f"exit code {found}:\n{self.screen}"

    # -- the run --

    @property
    def metrics(self) -> list[dict[str, Any]]:
        with suppress(FileNotFoundError):
            lines = self.run.metrics.read_text().splitlines()
            return [json.loads(line) for line in lines]
        return []

    @property
    def losses(self) -> list[float]:
        return [record["loss"] for record in self.metrics]

    @property
    def cause(self) -> Failure:
        found = failure.read(self.run)
        assert found is not None, self.screen
        return found

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in events.read(self.run) if event["kind"] == kind]

    def trains(self, steps: int) -> None:
        """Wait until so many steps are written down, and the launcher has noticed that it trains."""

        def reached() -> bool:
            assert self.process.poll() is None, f"it ended early:\n{self.screen}"
            return len(self.metrics) >= steps and status.read(self.run).state == "running"

        wait_until(reached, f"step {steps}", LIMIT_S)

    # -- the processes --

    def agents(self, node: str) -> list[int]:
        return [
            pid for pid, line in self.nodes.processes(node).items() if "-m nanoscale.agent" in line
        ]

    def fork_servers(self, node: str) -> list[int]:
        found = self.nodes.processes(node).items()
        agents = set(self.agents(node))
        return [pid for pid, line in found if "forkserver" in line and _parent(pid) in agents]

    def ranks(self, node: str) -> list[int]:
        """Processes of the ranks on a node, by their start, without the first host's store."""
        servers = set(self.fork_servers(node))
        copies = [pid for pid in self.nodes.processes(node) if _parent(pid) in servers]
        return sorted(pid for pid in copies if ".rank-" in stdout_name(pid))

    def only_rank(self, node: str) -> int:
        """Return the process of the only rank on a node."""
        (pid,) = self.ranks(node)
        return pid


class Terminal:
    """A terminal with a user, until the window is closed.

    Args:
        screen: the file that what it shows is copied to.
    """

    UNDER = ("setsid", "--ctty")
    """A command through which a program gets it as its own."""

    def __init__(self, screen: Path) -> None:
        self._screen = screen
        self._ours, self.theirs = os.openpty()
        self._closing = threading.Event()
        self._reader = threading.Thread(target=self._show, daemon=True)
        self._reader.start()

    def started(self) -> None:
        """Let the program alone have its end."""
        os.close(self.theirs)

    def hang_up(self) -> None:
        self._closing.set()
        self._reader.join()
        os.close(self._ours)  # the last reference, or the kernel would not send SIGHUP

    def _show(self) -> None:
        with self._screen.open("ab") as screen:
            while not self._closing.is_set():
                ready, _, _ = select.select([self._ours], [], [], 0.05)
                with suppress(OSError):
                    if ready:
                        screen.write(os.read(self._ours, 1 << 16))


def back_after(launch: Launch, strike: Callable[[], object]) -> float:
    """Strike a training that is granted restarts; seconds until it has trained a step again."""
    before = len(launch.events("resumed"))
    began = time.time()
    strike()

    def trained() -> float | None:
        assert launch.process.poll() is None, f"it ended:\n{launch.screen}"
        resumed = launch.events("resumed")[before:]
        steps = [record["time"] for record in launch.metrics] if resumed else []
        return min((when for when in steps if when > resumed[0]["time"]), default=None)

    return float(wait_until(trained, "step after the restart", LIMIT_S)) - began


def hostfile(folder: Path, *lines: str) -> Path:
    path = folder / "hostfile"
    path.write_text("\n".join(lines) + "\n")
    return path


def left(nodes: Nodes) -> dict[str, str]:
    """Return the remaining processes on running nodes, by node and pid, without sshd's own."""
    return {
        f"{node}:{pid}": line
        for node, found in nodes.processes_by_node().items()
        for pid, line in found.items()
        if "sshd: " not in line
    }


def nothing_left(nodes: Nodes, limit_s: float) -> float:
    """Wait until nothing runs on any node; when that was seen."""
    deadline = time.monotonic() + limit_s
    while found := left(nodes):
        assert time.monotonic() < deadline, f"left after {limit_s:g} s: {found}"
        time.sleep(0.05)
    return time.monotonic()


def agrees(losses: list[float], expected: list[float]) -> bool:
    """True if the losses agree from the first step on, as far as `expected` goes."""
    pairs = list(zip(losses, expected, strict=False))
    assert len(pairs) == len(losses), f"{len(losses)} steps, {len(expected)} to compare with"
    return all(abs(one - other) <= FP32 * abs(other) for one, other in pairs)


def interrupt(launch: Launch) -> None:
    launch.process.send_signal(signal.SIGINT)


def stdout_name(pid: int) -> str:
    """Return the name of the file that a process prints to."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/fd/1").readlink().name
    return ""


def _parent(pid: int) -> int:
    with suppress(psutil.Error):
        return int(psutil.Process(pid).ppid())
    return 0
