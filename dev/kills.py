"""Kill a training at random instants and see that nothing is lost: `python dev/kills.py [--times 60]`.

The recipe `debug` trains on this machine with a checkpoint every 2 steps, every second run with asynchronous
saves. At each instant the launcher, the agent, a worker or all of them get SIGKILL. Then

- no process of the job may be left, nor any temporary folder of it,
- every checkpoint that was announced must be there, and no more steps may be lost than between two checkpoints,
- `nanoscale resume` must continue, and the run must end with the weights, the optimizer states and the metrics
  of an undisturbed run, bit for bit.

Prints a line for each instant and exits with 1 if anything else was seen. Takes about ten minutes on two idle
cores.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

SOURCE = Path(__file__).parents[1]
STEPS, EVERY = 24, 2
KILLS_A_RUN = 6
TARGETS = ("launcher", "agent", "worker", "all")
LIMIT_S = 120.0
GONE_S = 20.0
"""Seconds for the rest of a job to end; a few on an idle machine."""
MARK = "NANOSCALE_KILLS"


class Launch:
    """A running launcher, and all of its descendants."""

    def __init__(self, folder: Path, words: list[str]) -> None:
        self.mark = uuid.uuid4().hex
        (folder / "tmp").mkdir(exist_ok=True)
        environment = {**os.environ, MARK: self.mark, "TMPDIR": str(folder / "tmp")}
        environment["PYTHONPATH"] = str(SOURCE)
        with (folder / "screen").open("ab") as screen:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "nanoscale", *words],
                cwd=folder,
                env=environment,
                stdout=screen,
                stderr=screen,
            )

    def processes(self) -> list[psutil.Process]:
        return [process for process in psutil.process_iter() if self._owns(process)]

    def kill(self, target: str, dice: random.Random) -> str:
        """SIGKILL one kind of process, or all kinds; return the kind."""
        agents = [p for p in self.processes() if p.cmdline()[-2:] == ["-m", "nanoscale.agent"]]
        servers = [p for p in self.processes() if any("forkserver" in w for w in p.cmdline())]
        workers = [p for p in servers if p.ppid() in {server.pid for server in servers}]
        chosen = {
            "launcher": [self.process.pid],
            "agent": [p.pid for p in agents],
            "worker": [dice.choice(workers).pid] if workers else [],
            "all": [self.process.pid, *(p.pid for p in (*agents, *workers))],
        }[target]
        for pid in chosen or [self.process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return target if chosen else "launcher"

    def _owns(self, process: psutil.Process) -> bool:
        try:
            dead = process.status() == psutil.STATUS_ZOMBIE
            return not dead and process.environ().get(MARK) == self.mark
        except psutil.Error:
            return False


class Run:
    """A run, killed and resumed until its end."""

    def __init__(self, folder: Path, ranks: int, asynchronous: bool) -> None:
        self.folder = folder
        self.path = folder / "runs" / "r"
        self._words = [
            "train",
            *("recipe=debug", "model.layers=2", "run.name=r", "launcher.device=cpu"),
            *(f"parallel.dp={ranks}", "launcher.threads=1", "train.sample_tokens=0"),
            *(f"train.steps={STEPS}", f"checkpoint.every={EVERY}", "checkpoint.keep_last=null"),
            f"checkpoint.asynchronous={str(asynchronous).lower()}",
        ]
        self.asynchronous = asynchronous
        folder.mkdir(parents=True)

    def launch(self) -> Launch:
        there = (self.path / "config.yaml").exists()
        return Launch(self.folder, ["resume", "runs/r"] if there else self._words)

    def finish(self) -> int:
        return self.launch().process.wait(LIMIT_S)

    @property
    def events(self) -> list[dict[str, Any]]:
        return list(_lines(self.path / "events.jsonl"))

    @property
    def step(self) -> int:
        """Return the last known trained step."""
        return max((record["step"] for record in _lines(self.path / "metrics.jsonl")), default=0)

    @property
    def saved(self) -> list[int]:
        return sorted(int(p.name[5:]) for p in (self.path / "checkpoints").glob("step-*"))

    @property
    def announced(self) -> list[int]:
        return [int(str(e["step"])) for e in self.events if e["kind"] == "checkpoint"]

    def digest(self) -> str:
        """Return a digest of the run's result: its last weights and optimizer states, and all of its
        losses."""
        digest = hashlib.sha256()
        for path in sorted((self.path / "checkpoints" / f"step-{STEPS:08d}").glob("*.distcp")):
            digest.update(path.read_bytes())
        for record in _lines(self.path / "metrics.jsonl"):
            digest.update(repr((record["step"], record["loss"], record["grad_norm"])).encode())
        return digest.hexdigest()


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with suppress(FileNotFoundError):
        for line in path.read_text().splitlines():
            with suppress(ValueError):
                yield json.loads(line)


def _wait(condition: Callable[[], bool], limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def strike(run: Run, dice: random.Random, number: int) -> list[str]:
    """Launch the run, kill it at a random instant, and print a line.

    Returns:
        the problem; "ended" if the run had ended before.
    """
    attempts = sum(event["kind"] == "attempt" for event in run.events)
    began, before = time.monotonic(), run.step
    launch = run.launch()
    ended = lambda: launch.process.poll() is not None  # noqa: E731
    if dice.random() < 0.25:  # while it starts
        moment = dice.uniform(0, 4.0)
        _wait(lambda: ended() or time.monotonic() - began > moment, LIMIT_S)
    else:
        steps = before + dice.randint(1, 6)
        running = lambda: sum(e["kind"] == "running" for e in run.events) > attempts  # noqa: E731
        _wait(lambda: ended() or (run.step >= steps) or (running() and run.step >= STEPS), LIMIT_S)
        time.sleep(dice.uniform(0, 0.3))
    if ended():
        return ["ended"]
    struck = time.monotonic()
    target = launch.kill(dice.choice(TARGETS), dice)
    if not _wait(ended, LIMIT_S):
        return [f"the launcher did not end within {LIMIT_S:g} s"]
    gone = _wait(lambda: not launch.processes(), GONE_S)
    took = time.monotonic() - struck
    wrong = [] if gone else [f"left: {[p.cmdline()[:4] for p in launch.processes()]}"]
    for process in launch.processes():
        process.kill()
    folders = [path.name for path in (run.folder / "tmp").glob("nanoscale-*")]
    wrong += [f"left: {folders}"] if folders else []
    lost, missing = run.step - max(run.saved, default=0), set(run.announced) - set(run.saved)
    wrong += [f"announced and not there: {sorted(missing)}"] if missing else []
    if lost > EVERY * (1 + run.asynchronous):  # a background save may be several steps behind
        wrong.append(f"{lost} steps lost")
    how = "async" if run.asynchronous else "sync"
    last = f"step {run.step:2}, saved {max(run.saved, default=0):2}"
    line = f"{number:3}  {how:5}  {target:8}  {struck - began:6.2f} s  {last}  {took:5.2f} s"
    print(f"{line}  {'; '.join(wrong) or 'ok'}", flush=True)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--times", type=int, default=60, help="instants")
    parser.add_argument("--seed", type=int, default=1, help="of the instants and of what is killed")
    parser.add_argument("--ranks", type=int, default=2, help="processes that train")
    options = parser.parse_args()
    dice = random.Random(options.seed)
    violations = 0
    with tempfile.TemporaryDirectory(prefix="kills-") as name:
        undisturbed = Run(Path(name) / "undisturbed", options.ranks, asynchronous=False)
        if undisturbed.finish() != 0:
            sys.exit((undisturbed.folder / "screen").read_text())
        expected = undisturbed.digest()
        print(" no  save   killed     after     state when it had ended     ended  verdict")
        done = number = 0
        while done < options.times:
            run = Run(Path(name) / str(number), options.ranks, asynchronous=number % 2 == 1)
            number += 1
            for _ in range(min(KILLS_A_RUN, options.times - done)):
                wrong = strike(run, dice, done + 1)
                if wrong == ["ended"]:
                    break
                violations += bool(wrong)
                done += 1
            code = run.finish() if STEPS not in run.saved else 0
            same = run.digest() == expected
            violations += not same or code != 0
            verdict = "as undisturbed, bit for bit" if same else "NOT as undisturbed"
            print(f"run {number}: exit code {code}, {verdict}", flush=True)
            if code != 0:
                print((run.folder / "screen").read_text()[-3000:])
    print(f"{done} instants, {number} runs, {violations} violations")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
