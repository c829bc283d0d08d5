"""Strike a training with faults while it runs on real hosts, and measure what each one costs.

    python dev/live.py faults [COUNT] [SEED] [fixed] [KEY=VALUE …]
                                        faults at random instants, of all kinds
    python dev/live.py times [COUNT]    each kind of fault so many times, and torchrun's restart
    python dev/live.py overhead         what saving into memory costs on this machine
    python dev/live.py soak [MINUTES]   a fault a minute

`fixed` makes the job need all hosts; a lost one comes back after AWAY_S. Further overrides are the job's, such
as `checkpoint.memory_every=5`.

The hosts are network namespaces of this machine with a real sshd each (tests/cluster/nodes.py), which takes
root. The job trains the recipe `debug` in fp64 with one rank a host, and saves every step into memory unless
an override says otherwise. At the end its losses are compared with the losses of one process. docs/faults.md
has the results.
"""

from __future__ import annotations

import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import psutil

from nanoscale.processes import scratch
from nanoscale.runs.directory import read_json
from nanoscale.runs.goodput import goodput
from nanoscale.runs.jsonlines import read as read_lines
from tests.cluster.launches import SOURCE, Launch, hostfile, interrupt, nothing_left
from tests.cluster.machines import wait_until
from tests.cluster.nodes import Nodes

HOSTS = ("n1", "n2", "n3")
JOB = (
    *(
        "recipe=debug",
        "model.layers=2",
        "scheduler=constant",
        "optimizer.lr=1e-5",
        "precision=fp64",
    ),
    *(
        "train.global_batch=6",
        "train.steps=1000000",
        "train.eval_every=50",
        "train.sample_tokens=0",
    ),
    *("launcher.device=cpu", "launcher.threads=1", "launcher.max_restarts=100000"),
    *("checkpoint.every=100", "checkpoint.memory_every=1", "zero.stage=1", "run.name=r"),
)
ELASTIC = ("launcher.nodes=2:3", "parallel.dp=auto")
FIXED = ("launcher.connect_timeout_s=5",)
AWAY_S = 12.0
"""The time for which a host of a fixed job is away: longer than `launcher.connect_timeout_s` of the job."""
FP64 = 1e-9
"""The largest relative difference of losses between layouts."""
LIMIT_S = 120.0
_PATIENCE_S = 3.0
"""`launcher.lost_after_s` of the job; on two busy cores a heartbeat may take a second."""


@dataclass
class Struck:
    """A fault and what followed."""

    kind: str
    seconds: float
    """The time from the fault to the end of the first step after it."""
    lost: int
    """Steps that were trained twice."""
    source: str
    """The event about the state from which the training continued."""


@dataclass
class Live:
    """A job on hosts, and the faults that it has seen."""

    nodes: Nodes
    folder: Path
    overrides: tuple[str, ...]
    away_s: float | None = None
    """The time after which a lost host is back; None: it is back once the job has trained a step without it."""
    hosts: tuple[str, ...] = HOSTS
    struck: list[Struck] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._command = ["train", *JOB, f"launcher.lost_after_s={_PATIENCE_S:g}", *self.overrides]
        lines = (f"{host} slots=1" for host in self.hosts)
        self._command += ["--hostfile", str(hostfile(self.folder, *lines))]
        self.launch = Launch(self.nodes, self.folder, *self._command)
        self.launch.trains(5)

    def strike(self, kind: str) -> None:
        """Let a fault happen, wait until the job has trained a step after it, and repair what was broken."""
        host = random.choice([it["host"] for it in read_json(self.launch.run.launch)["hosts"]])
        reached, began = self.launch.metrics[-1]["step"], time.time()
        seen = len(self.launch.events("running"))
        repair = FAULTS[kind](self, host)
        if self.away_s is not None and repair is not _nothing:
            time.sleep(self.away_s)
            repair()
            repair = _nothing
        step, source, seconds = wait_until(
            lambda: self._after(seen, began), f"step after: {kind} on {host}", LIMIT_S
        )
        self.struck.append(Struck(kind, seconds, max(0, reached - step), source))
        print(
            f"{kind} on {host}: {seconds:.1f} s, {reached - step} steps lost, {source}", flush=True
        )
        repair()

    def _after(self, seen: int, began: float) -> tuple[int, str, float] | None:
        """Return the step from which the job continued, from where, and the seconds to the next one."""
        assert self.launch.process.poll() is None, f"it ended with {self.launch.process.returncode}"
        starts = self.launch.events("running")[seen:]
        later = [it for it in self.launch.metrics if starts and it["time"] > starts[0]["time"]]
        if not later:
            return None
        resumed = [it for it in self.launch.events("resumed") if it["time"] > began]
        source = resumed[0]["message"] if resumed else "from the beginning"
        return later[0]["step"] - 1, source, later[0]["time"] - began

    def resume(self) -> None:
        """Resume by hand, after the launcher was killed."""
        nothing_left(self.nodes, 30.0)
        self.launch = Launch(self.nodes, self.folder, "resume", "r")

    def end(self) -> None:
        """Stop the job; nothing of it may be left."""
        interrupt(self.launch)
        self.launch.must_end(130)
        nothing_left(self.nodes, 30.0)
        left = [path for path in Path("/dev/shm").glob("nanoscale-*") if scratch.is_stale(path)]
        assert not left, left

    def compare(self, expected: list[float], tolerance: float) -> float:
        """Return the largest relative difference from other losses, which must be within the tolerance."""
        steps = [record["step"] for record in self.launch.metrics]
        assert steps == list(range(1, len(steps) + 1)), "a step is missing or doubled"
        pairs = list(zip(self.launch.losses, expected, strict=False))
        largest = max(abs(one - other) / abs(other) for one, other in pairs)
        assert len(pairs) == len(steps) and largest <= tolerance, largest
        return largest


def _nothing() -> None:
    """Repair nothing."""


def _kill_rank(live: Live, host: str) -> Callable[[], None]:
    _signal(live.launch.ranks(host), signal.SIGKILL)
    return _nothing


def _freeze_rank(live: Live, host: str) -> Callable[[], None]:
    _signal(live.launch.ranks(host), signal.SIGSTOP)
    return _nothing


def _kill_agent(live: Live, host: str) -> Callable[[], None]:
    _signal(live.launch.agents(host), signal.SIGKILL)
    return _nothing


def _power_off(live: Live, host: str) -> Callable[[], None]:
    live.nodes.power_off(host)
    return lambda: live.nodes.power_on(host)


def _cut(live: Live, host: str) -> Callable[[], None]:
    live.nodes.partition(host)
    return lambda: live.nodes.heal(host)


def _corrupt(live: Live, host: str) -> Callable[[], None]:
    """Flip a bit of each state that the host keeps of its own rank, and kill the rank."""
    ranks = live.launch.ranks(host)
    _signal(ranks, signal.SIGSTOP)  # it would write the next state over them
    for path in live.nodes.seen_from(host, Path("/dev/shm")).glob("nanoscale-*/*-*-*-*.data"):
        with path.open("r+b") as file:
            byte = file.read(1)
            file.seek(0)
            file.write(bytes([byte[0] ^ 1]))
    _signal(ranks, signal.SIGKILL)
    return _nothing


def _kill_launcher(live: Live, host: str) -> Callable[[], None]:
    del host
    live.launch.process.kill()
    live.launch.process.wait()
    live.resume()
    return _nothing


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


FAULTS: dict[str, Callable[[Live, str], Callable[[], None]]] = {
    "rank killed": _kill_rank,
    "rank frozen": _freeze_rank,
    "agent killed": _kill_agent,
    "host off": _power_off,
    "network cut": _cut,
    "copy corrupted, rank killed": _corrupt,
    "launcher killed": _kill_launcher,
}


def faults(count: int, seed: int, overrides: tuple[str, ...], *, is_fixed: bool) -> None:
    """Strike so many times at random instants, also while the job still recovers from the fault before.

    Jobs with successive seeds begin the list of kinds where the last one ended.
    """
    random.seed(seed)
    with tempfile.TemporaryDirectory() as name, Nodes(Path(name) / "nodes") as nodes:
        every = (*(FIXED if is_fixed else ELASTIC), *overrides)
        live = Live(nodes, Path(name), every, AWAY_S if is_fixed else None)
        numbers = range((seed - 1) * count, seed * count)
        kinds = [list(FAULTS)[number % len(FAULTS)] for number in numbers]
        random.shuffle(kinds)
        for kind in kinds:
            time.sleep(random.expovariate(1.0))
            live.strike(kind)
        live.end()
        table(live.struck)
        compare(live, Path(name))


def compare(live: Live, folder: Path) -> None:
    """Compare the losses with the losses of one process."""
    steps = len(live.launch.metrics)
    largest = live.compare(alone(folder, steps), FP64)
    print(f"{steps} steps; the largest difference from one process is {largest:.1e}")
    if seconds := goodput(live.launch.run):
        print(seconds.document()["sentence"])


def alone(folder: Path, steps: int) -> list[float]:
    """Return the losses of the same job in one process."""
    overrides = (
        *JOB,
        "run.name=alone",
        f"run.root={folder}",
        f"train.steps={steps}",
        "zero.stage=0",
    )
    others = ("checkpoint.memory_every=0", "launcher.max_restarts=0", "train.eval_every=0")
    nanoscale("train", *overrides, *others, "checkpoint.every=0")
    return [record["loss"] for record in read_lines(folder / "alone" / "metrics.jsonl")]


def nanoscale(*arguments: object) -> None:
    command = [sys.executable, "-m", "nanoscale", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)


def table(struck: list[Struck]) -> None:
    """Print a row for each kind of fault."""
    by_kind = defaultdict(list)
    for it in struck:
        by_kind[it.kind].append(it)
    print(
        "| fault | times | to the next step, median | longest | steps trained twice, most | from memory |"
    )
    print("|---|---|---|---|---|---|")
    for kind, those in by_kind.items():
        seconds = [it.seconds for it in those]
        memory = sum("memory" in it.source for it in those)
        cells = (
            *(kind, len(those), f"{statistics.median(seconds):.1f} s", f"{max(seconds):.1f} s"),
            *(max(it.lost for it in those), f"{memory} of {len(those)}"),
        )
        print(f"| {' | '.join(map(str, cells))} |")


def times(count: int) -> None:
    """Strike two hosts with each kind of fault so many times; and a job of torchrun."""
    with tempfile.TemporaryDirectory() as name, Nodes(Path(name) / "nodes") as nodes:
        live = Live(nodes, Path(name), ELASTIC)
        for kind in [kind for kind in FAULTS if kind != "launcher killed"]:
            for _ in range(count):
                time.sleep(2.0)
                live.strike(kind)
        live.end()
        table(live.struck)
        print(f"torchrun, rank killed: {_seconds(torchrun(nodes, Path(name), count))}")


TORCHRUN = """
import os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
folder = sys.argv[1]
dist.init_process_group("gloo", timeout=timedelta(seconds=20))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, 256))
optimizer = torch.optim.AdamW(model.parameters())
path, step = f"{folder}/torchrun.pt", 0
if os.path.exists(path):
    saved = torch.load(path)
    model.load_state_dict(saved["model"]); optimizer.load_state_dict(saved["optimizer"]); step = saved["step"]
while True:
    model(torch.randn(8, 256)).square().mean().backward()
    optimizer.step(); optimizer.zero_grad(); step += 1
    if dist.get_rank() == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, path + ".new"); os.replace(path + ".new", path)
        with open(f"{folder}/torchrun.steps", "a") as file:
            file.write(f"{time.time()} {step}\\n")
"""


def torchrun(nodes: Nodes, folder: Path, count: int) -> list[float]:
    """Return the seconds from the death of a rank to the next step, with a checkpoint on disk at every step."""
    script, steps = folder / "job.py", folder / "torchrun.steps"
    script.write_text(TORCHRUN)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"),
        *(
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={nodes.address('n1')}:29500",
            "--max-restarts=1000",
        ),
    ]
    running = [
        nodes.run_in(
            *(node, [*command, f"--local-addr={nodes.address(node)}", script, folder]),
            env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for node in ("n1", "n2")
    ]
    seconds = []
    try:
        wait_until(
            lambda: steps.exists() and len(steps.read_text().splitlines()) > 5,
            "torchrun's steps",
            LIMIT_S,
        )
        for _ in range(count):
            time.sleep(2.0)
            began = time.time()
            _signal(
                (
                    p
                    for p, line in nodes.processes("n2").items()
                    if "-u" in line and str(script) in line
                ),
                signal.SIGKILL,
            )
            time.sleep(0.2)  # steps in progress are written

            def after(began: float = began) -> float | None:
                last = steps.read_text().splitlines()[-1:]
                later = [float(line.split()[0]) for line in last]
                return later[0] - began if later and later[0] > began + 0.2 else None

            seconds.append(float(wait_until(after, "torchrun's next step", LIMIT_S)))
    finally:
        for process in running:
            process.kill()
    return seconds


def _seconds(values: list[float]) -> str:
    return f"median {statistics.median(values):.1f} s, longest {max(values):.1f} s ({len(values)} times)"


OVERHEAD = {
    "tiny on 2 ranks": ("recipe=tiny", "parallel.dp=2", "launcher.devices=2", "train.steps=200"),
    "debug on 16 ranks": (
        *("recipe=debug", "parallel.dp=16", "launcher.devices=16", "train.global_batch=32"),
        "train.steps=60",
    ),
}
QUIET = (
    *("checkpoint.every=0", "checkpoint.at_end=false", "train.sample_tokens=0"),
    *("train.eval_every=0", "train.log_every=1"),
)


def overhead() -> None:
    """Print the time of a step without saves into memory, with one each step, and with one in ten."""
    with tempfile.TemporaryDirectory() as name:
        for job, overrides in OVERHEAD.items():
            fastest: dict[int, float] = defaultdict(lambda: math.inf)
            for number in range(6):
                for every in (0, 1, 10) if number % 2 else (10, 1, 0):
                    memory = (f"checkpoint.memory_every={every}", "launcher.max_restarts=1")
                    where = (f"run.root={name}", f"run.name={number}-{every}-{len(overrides)}")
                    nanoscale("train", *overrides, *QUIET, *where, *(memory if every else ()))
                    records = read_lines(Path(name) / where[1][9:] / "metrics.jsonl")
                    moments = [record["time"] for record in records[10:]]
                    step_s = statistics.fmean(b - a for a, b in pairwise(moments))
                    fastest[every] = min(fastest[every], step_s)
            for every in (1, 10):
                more = fastest[every] / fastest[0] - 1
                print(f"{job}, every {every}: {more:+.1%} of {fastest[0] * 1e3:.1f} ms", flush=True)


PAUSE = "import time\n\n\ndef on_step_end(moment):\n    time.sleep(0.2)\n"
"""A hook that makes steps longer, so that one process can compute all of them again in minutes."""


def soak(minutes: int) -> None:
    """Let a fault happen each minute on three hosts."""
    random.seed(minutes)
    with tempfile.TemporaryDirectory() as name, Nodes(Path(name) / "nodes") as nodes:
        hooks = Path(name) / "hooks.py"
        hooks.write_text(PAUSE)
        live = Live(nodes, Path(name), (*ELASTIC, f"hooks.path={hooks}"))
        kinds = [kind for kind in FAULTS if kind != "launcher killed"]
        most: list[int] = []
        for minute in range(minutes):
            began = time.monotonic()
            live.strike(kinds[minute % len(kinds)])
            time.sleep(max(0.0, began + 60.0 - time.monotonic()))
            held = held_by(live.launch.process.pid)
            most = [*map(max, held, most or held)]
            print(f"the launcher holds {_HELD.format(*held)}", flush=True)
        live.end()
        table(live.struck)
        compare(live, Path(name))
        print(f"the launcher held at most {_HELD.format(*most)}")


_HELD = "{} descriptors, {} threads, {} MiB, {} processes"


def held_by(pid: int) -> tuple[int, int, int, int]:
    """Return the descriptors, threads, MiB of resident memory, and child processes of a process."""
    process = psutil.Process(pid)
    resident = process.memory_info().rss >> 20
    return process.num_fds(), process.num_threads(), resident, len(process.children())


def main() -> None:
    what, *others = sys.argv[1:] or ["faults"]
    first, second = [*(int(it) for it in others if it.isdigit()), 0, 0][:2]
    overrides = tuple(it for it in others if "=" in it)
    match what:
        case "faults":
            faults(first or 60, second or 1, overrides, is_fixed="fixed" in others)
        case "times":
            times(first or 20)
        case "overhead":
            overhead()
        case "soak":
            soak(first or 60)
        case _:
            sys.exit(str(__doc__))


if __name__ == "__main__":
    main()
