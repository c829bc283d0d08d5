"""The step of nanoscale's whole loop beside a plain PyTorch loop, DeepSpeed and transformers' Trainer.

    python -m scripts.bench_step [RANKS] [ZERO STAGE]

Blocks of steps alternate within the same processes, and a ratio is the median over neighbouring blocks, so that
what else the machine does falls on all of them. Prints one JSON line: seconds a step by name.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from nanoscale.config import frozen
from nanoscale.config.compose import compose
from nanoscale.config.rules import Devices, check
from nanoscale.config.schema import Config
from nanoscale.data.dataset import Dataset, open_data
from nanoscale.devices import cores
from nanoscale.metrics.meter import Meter
from nanoscale.metrics.sinks import open_sinks
from nanoscale.parallel import ranks
from nanoscale.runs import fence
from nanoscale.runs.directory import RunDirectory
from nanoscale.train.job import make_engine
from nanoscale.train.loop import Progress, Training
from nanoscale.train.stop import StopAgreement
from nanoscale.worker import StopFlag
from scripts.bench_peers import DeepSpeed, Plain, drive_trainer

ROUNDS, STEPS = 32, 8
WORDS = ("train.steps=100000", "train.eval_every=0", "checkpoint.at_end=false", "logger=none")


def main() -> None:
    world = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    stage = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    if "RANK" in os.environ:
        print_on_first(measure(world, stage))
    else:
        start_ranks(world, stage)


def start_ranks(world: int, stage: int) -> None:
    """This script as so many ranks, which share the cores."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, f"--nproc-per-node={world}", "-m", "scripts.bench_step"]
    threads = str(max(1, cores() // world))
    environment = os.environ | {"OMP_NUM_THREADS": threads}
    subprocess.run([*command, str(world), str(stage)], check=True, env=environment)


def measure(world: int, stage: int) -> dict[str, list[float]]:
    """Seconds a step by name, round by round; the first rounds, which warm up, are left out."""
    logging.disable(logging.WARNING)
    rounds: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = bench_config(world, stage, folder)
        data = open_data(config.data, config.train, config.model.vocab)
        ranks.join(world, torch.device("cpu"), 120.0)
        ours = Ours(config, data, folder)
        plain, deepspeed = Plain(config, data), DeepSpeed(config, data)
        blocks = [
            ("plain", repeat(plain.step)),
            ("ours", ours.block),
            ("deepspeed", repeat(deepspeed.step)),
        ]

        def turn(trainer: float) -> bool:
            rounds.append({name: timed(block) for name, block in blocks} | {"trainer": trainer})
            blocks.reverse()  # nobody always follows the same one
            return len(rounds) < ROUNDS

        drive_trainer(config, data, folder, STEPS, turn)
        ours.stop.close()
    kept = rounds[2:]
    return {name: [one[name] for one in kept] for name in (*dict(blocks), "trainer")}


def bench_config(world: int, stage: int, folder: Path) -> Config:
    layout = (f"parallel.dp={world}", f"zero=stage{stage}", "launcher.device=cpu")
    return check(
        compose(["recipe=tiny", *WORDS, *layout, f"run.root={folder}"]), Devices("cpu", world)
    )


class Ours:
    """The whole loop: data, engine, stop question, meter, metrics.jsonl."""

    def __init__(self, config: Config, data: Dataset, folder: Path) -> None:
        device, rank = torch.device("cpu"), int(os.environ["RANK"])
        run = RunDirectory.create(folder, "bench")
        run.config.write_text(frozen.dump(config))
        fence.begin(run, 0)
        workspace = run.workspace(0)
        self.stop = StopAgreement(StopFlag())
        self.training = Training(
            workspace=workspace,
            config=config,
            engine=make_engine(config, device),
            data=data,
            progress=Progress(),
            rank=rank,
            meter=Meter(config, 1, device),
            sinks=open_sinks(run, workspace, config.logger, 0) if rank == 0 else [],
            note=lambda *_, **__: None,
        )

    def block(self) -> None:
        training = self.training
        training.sizes = replace(training.sizes, steps=training.progress.step + STEPS)
        training.go(self.stop)


def repeat(step: Callable[[], None]) -> Callable[[], None]:
    def act() -> None:
        for _ in range(STEPS):
            step()

    return act


def timed(block: Callable[[], None]) -> float:
    if dist.is_initialized():
        dist.barrier()
    began = time.perf_counter()
    block()
    return (time.perf_counter() - began) / STEPS


def print_on_first(found: dict[str, list[float]]) -> None:
    if int(os.environ["RANK"]) == 0:
        plain = found["plain"]
        result = {
            name: {
                "seconds": statistics.median(times),
                "ratio": statistics.median(a / b for a, b in zip(times, plain, strict=True)),
            }
            for name, times in found.items()
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
