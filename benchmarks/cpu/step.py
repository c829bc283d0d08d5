"""The step time of nanoscale's whole loop, a plain PyTorch loop, DeepSpeed and transformers' Trainer.

    python -m benchmarks.cpu.step [RANKS] [ZERO STAGE] [ROUNDS] [STEPS OF A TURN]

Each has ranks of its own, which wait while another's are at work: in one process they would share a heap,
and the gradients that one leaves there decide where the next one's memory is. Turns are short, and a ratio
is the median over neighboring turns, so that what else the machine does falls on all of them. Prints one
JSON line: seconds a step by name.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO

import torch
import torch.distributed as dist

from benchmarks.cpu.peers import DeepSpeed, Plain, drive_trainer
from nanoscale.common.devices import cores
from nanoscale.config.composing import frozen
from nanoscale.config.composing.compose import compose
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.rules import Devices, check
from nanoscale.data.dataset import Dataset, open_data
from nanoscale.metrics.meter import Meter
from nanoscale.metrics.sinks import open_sinks
from nanoscale.metrics.trackers import Subject
from nanoscale.parallel import process_group
from nanoscale.processes.network import ReservedPort
from nanoscale.processes.proc import keep_freed_memory
from nanoscale.runs import fence
from nanoscale.runs.rank_context import StopFlag
from nanoscale.train.agreement import Agreement
from nanoscale.train.checkpointing import Progress
from nanoscale.train.job import make_engine
from nanoscale.train.loop import Training
from tests.support.runs import create_run

NAMES = ("plain", "ours", "deepspeed", "trainer")
WARM_UP = 4
"""Rounds that are left out if there are more."""
WORDS = ("train.steps=100000", "train.eval_every=0", "checkpoint.at_end=false", "logger=none")
GO = "go\n"


def main(words: list[str]) -> None:
    match words:
        case ["serve", name, *numbers]:
            serve(name, *map(int, numbers))
        case _:
            print(json.dumps(summary(measure(*map(int, words)))))


def measure(
    world: int = 1, stage: int = 0, count: int = 48, steps: int = 8
) -> list[dict[str, float]]:
    """Return seconds a step by name, round by round; the first rounds, which warm up, are left out."""
    with ExitStack() as stack:
        teams = [stack.enter_context(Team(name, world, stage, steps)) for name in NAMES]
        rounds = []
        for _ in range(count):
            rounds.append({team.name: team.turn() for team in teams})
            teams.reverse()  # no program always follows the same one
    return rounds[WARM_UP:] or rounds


def summary(rounds: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    return {
        name: {
            "seconds": statistics.median(each[name] for each in rounds),
            "ratio": statistics.median(each[name] / each["plain"] for each in rounds),
        }
        for name in NAMES
    }


class Team:
    """The ranks of one program, which work when it is their turn."""

    def __init__(self, name: str, world: int, stage: int, steps: int) -> None:
        self.name = name
        self._port = ReservedPort()
        self._ranks = [self._start(rank, world, stage, steps) for rank in range(world)]

    def _start(self, rank: int, world: int, stage: int, steps: int) -> subprocess.Popen[str]:
        serving = ["serve", self.name, *map(str, (world, stage, steps))]
        command = [sys.executable, "-m", "benchmarks.cpu.step", *serving]
        environment = os.environ | {"OMP_NUM_THREADS": str(max(1, cores() // world))}
        if world > 1:
            environment |= {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._port.number),
                "WORLD_SIZE": str(world),
                "LOCAL_WORLD_SIZE": str(world),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
            }
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)

    def turn(self) -> float:
        """Return the seconds a step of the first rank."""
        pipes = [pipes_of(rank) for rank in self._ranks]
        for stdin, _ in pipes:
            stdin.write(GO)
            stdin.flush()
        seconds = [float(stdout.readline()) for _, stdout in pipes]
        return seconds[0]

    def __enter__(self) -> Team:
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        for rank in self._ranks:
            rank.kill() if failed else pipes_of(rank)[0].close()
        for rank in self._ranks:
            rank.wait(60)
        self._port.close()


def pipes_of(rank: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    """Return standard input and output of a rank."""
    assert rank.stdin is not None and rank.stdout is not None
    return rank.stdin, rank.stdout


def serve(name: str, world: int, stage: int, steps: int) -> None:
    """Run a rank of a team."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the libraries print
    logging.disable(logging.WARNING)

    def report(seconds: float) -> bool:
        """Report the duration of a turn and wait for the next; True if there is one."""
        print(seconds, file=answers, flush=True)
        return wait()

    with tempfile.TemporaryDirectory() as folder:
        config = bench_config(world, stage, Path(folder))
        data = open_data(config.data, config.train, config.model.vocab)
        if name == "trainer":
            drive_trainer(config, data, Path(folder), steps, wait, report)
            return
        begin = {"plain": plain, "ours": ours, "deepspeed": deepspeed}[name]
        with begin(config, data, Path(folder)) as run:
            more = wait()
            while more:
                more = report(timed(partial(run, steps)) / steps)


def wait() -> bool:
    """Wait until the next turn begins: True; or until there is none: False."""
    return sys.stdin.readline() == GO


@contextmanager
def plain(config: ResolvedConfig, data: Dataset, _: Path) -> Iterator[Callable[[int], None]]:
    meet()
    yield repeat(Plain(config, data).step)


@contextmanager
def deepspeed(config: ResolvedConfig, data: Dataset, _: Path) -> Iterator[Callable[[int], None]]:
    meet()
    yield repeat(DeepSpeed(config, data).step)


@contextmanager
def ours(config: ResolvedConfig, data: Dataset, folder: Path) -> Iterator[Callable[[int], None]]:
    """Set up like `nanoscale.worker`."""
    keep_freed_memory()
    process_group.join(config.world_size, torch.device("cpu"), 120.0)
    whole = Ours(config, data, folder)
    yield whole.run
    whole.agreement.close()


def meet() -> None:
    """Join the process group as a hand-written script does."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")


def bench_config(world: int, stage: int, folder: Path) -> ResolvedConfig:
    layout = (f"parallel.dp={world}", f"zero=stage{stage}", "launcher.device=cpu")
    return check(
        compose(["recipe=tiny", *WORDS, *layout, f"run.root={folder}"]), Devices("cpu", world)
    )


class Ours:
    """The whole loop: data, engine, agreement, meter, metrics.jsonl."""

    def __init__(self, config: ResolvedConfig, data: Dataset, folder: Path) -> None:
        device, rank = torch.device("cpu"), int(os.environ.get("RANK", "0"))
        run = create_run(folder, "bench")
        run.config.write_text(frozen.dump(config))
        fence.begin(run, 0)
        workspace = run.workspace(0)
        self.agreement = Agreement(StopFlag())
        self.training = Training(
            workspace=workspace,
            config=config,
            engine=make_engine(config, device),
            data=data,
            progress=Progress(),
            rank=rank,
            meter=Meter(config, 1, device),
            sinks=open_sinks(Subject(run, config, workspace, 0), 0) if rank == 0 else [],
            note=lambda *_, **__: None,
        )
        if config.train.gc_every:  # once, as in `Training.run`: a turn is a part of a training
            gc.disable()
            gc.collect()

    def run(self, steps: int) -> None:
        training = self.training
        train = replace(training.config.train, steps=training.progress.step + steps)
        training.config = replace(training.config, train=train)
        training.advance_to_end(self.agreement)


def repeat(step: Callable[[], None]) -> Callable[[int], None]:
    def run(steps: int) -> None:
        for _ in range(steps):
            step()

    return run


def timed(act: Callable[[], None]) -> float:
    if dist.is_initialized():
        dist.barrier()
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


if __name__ == "__main__":
    main(sys.argv[1:])
