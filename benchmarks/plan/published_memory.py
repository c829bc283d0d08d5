"""The planner's memory compared with published measurements, row by row.

    python -m benchmarks.plan.published_memory

A row is another software's: its record describes its differences from ours, and no row has a constant of its
own. The records were written with these rows in sight, so they are not blind tests.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any, Literal

from benchmarks.plan.published_speed import OLDER_RUNS
from benchmarks.plan.software import MEGATRON, TORCH_WHOLELOSS, memory_of, software_setting
from nanoscale.common.units import GIB
from nanoscale.config.resolved import ResolvedConfig, resolved
from nanoscale.config.schema import Config, Model
from nanoscale.plan.memory.peak import RankMemory
from nanoscale.plan.memory.setting import MemorySetting

Row = dict[str, str]
RECOMPUTATION: dict[str, Literal["none", "full", "selective"]] = {
    "": "none",
    "full": "full",
    "selective": "selective",
}
"""Our names of what the rows recompute."""


@dataclass(frozen=True)
class Prediction:
    """The worst rank's memory, and the sum that the source states."""

    worst: RankMemory
    bytes: int


@dataclass(frozen=True)
class Comparison:
    """A row and its prediction."""

    source: str
    row: Row
    found: Prediction

    @property
    def error(self) -> float:
        """The relative error, the file's figures taken as GiB."""
        return self.found.bytes / GIB / float(self.row["mem_gb"]) - 1


def main() -> None:
    found = compare()
    print(f"{'model':16} {'layout':34} {'plan':>7} {'seen':>7} {'error':>7}  highest at")
    for one in found:
        print(
            f"{one.row['model']:16} {_layout(one.row):34} {one.found.bytes / GIB:7.2f} "
            f"{float(one.row['mem_gb']):7.2f} {one.error:+7.1%}  {one.found.worst.peak}"
        )
    for source in SOURCES:
        errors = [one.error for one in found if one.source == source]
        sizes = [abs(error) for error in errors]
        print(
            f"{source}: {len(sizes)} rows, mean |error| {mean(sizes):.1%}, largest {max(sizes):.1%}, "
            f"bias {mean(errors):+.1%}"
        )


def compare() -> list[Comparison]:
    """Compare every row that states its memory."""
    with OLDER_RUNS.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["mem_gb"]]
    return [
        Comparison(source, row, predict(row))
        for row in rows
        for source, predict in SOURCES.items()
        if source in row["source"]
    ]


def _layout(row: Row) -> str:
    degrees = " ".join(f"{axis}{row[axis]}" for axis in ("dp", "tp", "pp", "cp"))
    return f"{degrees} s{int(row['seq'] or 4096) // 1024}k b{row['mbs'] or '?'} {row['act_ckpt'] or 'none'}"


def config_of(
    row: Row, micro_batch: int, micro_batches: int, stage: Literal[1, 3]
) -> ResolvedConfig:
    """Return the row's job as one of ours."""
    shape = Model(
        layers=int(row["layers"]),
        hidden=int(row["hidden"]),
        heads=int(row["heads"]),
        kv_heads=int(row["kv_heads"]),
        head_dim=int(row["hidden"]) // int(row["heads"]),
        ffn=int(row["ffn"]),
        vocab=int(row["vocab"]),
        max_seq_len=int(row["seq"]),
    )
    base = Config()
    dp, pp = int(row["dp"]), int(row["pp"])
    job = replace(
        base,
        model=shape,
        parallel=replace(
            base.parallel,
            dp=dp,
            tp=int(row["tp"]),
            pp=pp,
            cp=int(row["cp"] or 1),
            virtual_stages=2 if "Interleaved" in row["source"] else 1,
            activation_checkpointing=RECOMPUTATION[row["act_ckpt"]],
        ),
        precision=replace(base.precision, compute="bf16", fp8="fp8" in row["precision"]),
        zero=replace(base.zero, stage=stage),
        backend=replace(base.backend, compile="on" if "compile" in row["precision"] else "off"),
        launcher=replace(base.launcher, device="cuda"),
        train=replace(
            base.train,
            micro_batch=micro_batch,
            global_batch=micro_batch * micro_batches * dp,
            seq_len=int(row["seq"]),
            steps=1,
        ),
    )
    return resolved(job)


def under_way(config: ResolvedConfig, micro_batches: int) -> list[list[int]]:
    """Return the in-flight micro batches of 1F1B, plain (Narayanan et al. 2021, 2104.04473, section 2.2) or
    looped."""
    pp, virtual = config.parallel.pp, config.parallel.virtual_stages
    if virtual == 1:
        return [[min(pp - rank, micro_batches)] for rank in range(pp)]
    counts = []
    for rank in range(pp):
        steps = min(2 * (pp - rank - 1) + (virtual - 1) * pp + 1, micro_batches * virtual)
        rounds, rest = divmod(steps, pp * virtual)
        counts.append([rounds * pp + min(pp, max(0, rest - turn * pp)) for turn in range(virtual)])
    return counts


def torchtitan(row: Row) -> Prediction:
    """Predict FSDP2's memory, as ours; its selective mode keeps products 1, 3, 5 and 7, its loss is not
    compiled, `pred` is deleted, and context parallelism gathers keys that are repeated for every head.

    Memory is the reserved memory. With a pipeline there are as many micro batches as stages, its default of
    that time.
    """
    stages = int(row["pp"]) * (2 if "Interleaved" in row["source"] else 1)
    samples = int(row["mbs"] or (32 if "batch 32" in row["source"] else 8))
    micro_batches = stages if stages > 1 else 1
    config = config_of(row, samples // micro_batches, micro_batches, stage=3)
    setting = software_setting(config, TORCH_WHOLELOSS)
    gathered = config.train.micro_batch * config.train.seq_len * (config.parallel.cp > 1)
    run = replace(setting.run, gathered_keys=gathered)
    kept: Any = frozenset(("wq", "v", "gate", "down"))
    parallel = replace(config.parallel, selective_keep=kept)
    setting = replace(setting, run=run, config=replace(config, parallel=parallel))
    boundary = 2 * setting.shape.tokens // setting.shape.shares * setting.shape.hidden
    flying = under_way(config, micro_batches)

    def reserved(rank: RankMemory) -> int:
        """Return the bytes with torch's own buffers: an input and a gradient of each micro batch and stage."""
        buffers = 2 * micro_batches * len(rank.stages) * (stages > 1)
        held = sum(flying[rank.rank]) + len(rank.stages) if buffers else 0  # in the plan already
        return rank.reserved + max(0, buffers - held) * boundary

    return _worst(setting, micro_batches, reserved)


def megatron(row: Row) -> Prediction:
    """Predict Megatron-LM's allocated memory. Blocks are divided evenly; context parallelism is Ulysses'."""
    dp, pp = int(row["dp"]), int(row["pp"])
    micro_batches = int(row["gbs"]) // dp
    config = config_of(row, 1, micro_batches, stage=1)
    layers = [config.model.layers // pp] * pp
    method: Literal["ring", "ulysses"] = "ulysses" if config.parallel.cp > 1 else "ring"
    parallel = replace(config.parallel, layers_per_stage=layers, cp_method=method)
    setting = software_setting(replace(config, parallel=parallel), MEGATRON)
    return _worst(setting, max(micro_batches, pp), lambda rank: rank.allocated)


def _worst(
    setting: MemorySetting, micro_batches: int, measure: Callable[[RankMemory], int]
) -> Prediction:
    ranks = memory_of(setting, under_way(setting.config, micro_batches))
    worst = max(ranks, key=measure)
    return Prediction(worst, measure(worst))


SOURCES: dict[str, Callable[[Row], Prediction]] = {"torchtitan": torchtitan, "SimuMax": megatron}


if __name__ == "__main__":
    main()
