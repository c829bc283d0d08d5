"""The time of rehearsed steps compared with real ranks on this CPU: `python -m benchmarks.plan.real_time`.

The speed of this CPU is measured first, as `nanoscale doctor` does. A real step is the fastest of many, because
other processes use the CPU too.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.plan.played_time import Row, measure
from nanoscale.cli.common.rehearsal import rehearsed
from nanoscale.common.devices import Devices, cores
from nanoscale.config.composing.compose import compose
from nanoscale.config.hardware.data_sheets import keep_speed, known_speed
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.rules import check
from nanoscale.data.batch import Batch
from nanoscale.measure.this_cpu import fastest_step
from nanoscale.parallel import process_group
from nanoscale.plan.predict import predict
from nanoscale.train.job import make_engine
from tests.support.ranks import run_ranks

_COMMON = (
    "recipe=tiny", "launcher.device=cpu", "launcher.threads=1", "backend.compile=off", "train.seq_len=256",
    "model.tie_embeddings=false",
    "train.global_batch=8", "train.micro_batch=2", "run.root=/tmp/none",
)  # fmt: skip
ROWS: dict[str, tuple[int, tuple[str, ...]]] = {
    "dp 2, ZeRO 0": (2, ("parallel.dp=2", "zero=stage0")),
    "dp 2, ZeRO 3": (2, ("parallel.dp=2", "zero=stage3")),
    "tp 2": (2, ("parallel.tp=2",)),
    "pp 2": (2, ("parallel.pp=2", "parallel.schedule=1f1b")),
    "cp 2, ring": (2, ("parallel.cp=2", "parallel.cp_method=ring")),
    "dp 4, ZeRO 2": (4, ("parallel.dp=4", "train.micro_batch=1", "zero=stage2")),
    "dp 2, tp 2": (4, ("parallel.dp=2", "parallel.tp=2")),
    "dp 2, pp 2": (4, ("parallel.dp=2", "parallel.pp=2", "parallel.schedule=1f1b")),
}
"""Name → number of ranks and overrides."""


def real_steps(_rank: int, config: ResolvedConfig, steps: int) -> list[tuple[float, float]]:
    """Return the seconds of this rank's steps, which all ranks begin together, and the seconds that its thread
    computes."""
    torch.set_num_threads(1)
    process_group.join(config.world_size, torch.device("cpu"), 60.0)
    random = np.random.default_rng(0)
    shape = config.train.micro_batch, config.train.seq_len + 1
    engine = make_engine(config, torch.device("cpu"))
    rows = [random.integers(0, config.model.vocab, shape) for _ in range(config.accumulation)]
    seconds = []
    for _ in range(steps + 2):
        dist.barrier()
        began, computed = time.perf_counter(), time.thread_time()
        engine.train_step([Batch.of_rows(each) for each in rows], 1e-3)
        seconds.append((time.perf_counter() - began, time.thread_time() - computed))
    return seconds[2:]


def fastest(config: ResolvedConfig, steps: int) -> tuple[float, float]:
    """Return the seconds of the fastest step, and the least seconds that a thread computes, of the slowest
    rank."""
    ranks: Sequence[Sequence[tuple[float, float]]] = run_ranks(
        real_steps, config.world_size, config, steps
    )
    elapsed, computed = (
        [max(rank[number][part] for rank in ranks) for number in range(steps)] for part in (0, 1)
    )
    return min(elapsed), min(computed)


def config_of(ranks: int, overrides: Sequence[str]) -> ResolvedConfig:
    return check(compose([*_COMMON, *overrides]), Devices("cpu", ranks, cores=cores()))


def measure_speed() -> float:
    """Measure and keep the speed of a CPU's core as a factor on the assumed one, and return it."""
    config = config_of(1, ("train.seq_len=128", "train.micro_batch=4", "train.global_batch=4"))
    measured = min(fastest_step(config, time.thread_time) for _ in range(2))
    keep_speed((known_speed() or 1.0) * predict(config).time.seconds / measured)
    return known_speed() or 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="rows to measure; none: all")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["NANOSCALE_CACHE"] = cache
        print(f"speed {measure_speed():.3f} of the assumed CPU", flush=True)
        for name in options.names or ROWS:
            config = config_of(*ROWS[name])
            real, computed = fastest(config, options.steps)
            row: Row = measure(name, config, rehearsed(config, "distinct", 2))
            print(
                f"{name}: real {1e3 * real:.1f} ms, played {1e3 * row.played.seconds:.1f} ms "
                f"({row.played.seconds / real:.2f}), planned {1e3 * row.planned:.1f} ms "
                f"({row.planned / real:.2f}); computes {1e3 * computed:.1f} ms, played "
                f"{1e3 * row.played.computed:.1f} ms ({row.played.computed / computed:.2f})\n{row.parts()}",
                flush=True,
            )


if __name__ == "__main__":
    main()
