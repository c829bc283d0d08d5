"""The time of rehearsed steps compared with the plan's: `python -m benchmarks.plan.played_time [NAME …]`.

Both read one table of efficiencies. The plan counts operations and collectives by formulas, and a rehearsal
counts the operations of the real code, so a difference is a mistake on one side. Every row is a packaged recipe
with few layers on hosts of eight H100s, without the compiler.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from nanoscale.cli.common.rehearsal import rehearsed
from nanoscale.common.errors import UserError
from nanoscale.common.units import duration
from nanoscale.config.composing.compose import compose
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.rules import check
from nanoscale.plan.hardware.planned_devices import planned_devices
from nanoscale.plan.predict import predict
from nanoscale.plan.rehearsed.step_time import times_of
from nanoscale.plan.rehearsed.streams import RankTime
from nanoscale.plan.time.step import StepBreakdown

_COMMON = ("cluster=h100-sxm", "cluster.hosts=1", "backend.compile=off", "train.micro_batch=1")
_8B = ("recipe=llama-8b", "model.layers=4", "parallel.activation_checkpointing=none")
_DP, _TP = (*_8B, "train.global_batch=16"), (*_8B, "parallel.tp=4", "zero=stage1")
_CP = (*_8B, "parallel.cp=4", "zero=stage3", "train.seq_len=32768", "train.global_batch=4")
_PP = (*_8B, "zero=stage1", "parallel.pp=4", "train.global_batch=16")
_MOE = (
    "recipe=mixtral-8x7b", "model.layers=2", "train.global_batch=16", "parallel.tp=1", "parallel.pp=1",
    "parallel.dp=8", "zero=stage3", "parallel.activation_checkpointing=none",
)  # fmt: skip
ROWS: dict[str, tuple[str, ...]] = {
    "ZeRO 0": (*_DP, "zero=stage0"),
    "ZeRO 1": (*_DP, "zero=stage1"),
    "ZeRO 2": (*_DP, "zero=stage2"),
    "ZeRO 3": (*_DP, "zero=stage3"),
    "two hosts": (*_DP, "zero=stage3", "cluster.hosts=2", "train.global_batch=32"),
    "replicas": (*_DP, "zero=stage3", "cluster.hosts=2", "train.global_batch=32", "parallel.dp_replicate=2"),
    "tp": (*_TP, "train.global_batch=4"),
    "tp without sp": (*_TP, "train.global_batch=4", "parallel.sequence_parallel=false"),
    "tp 8": (*_TP, "train.global_batch=2", "parallel.tp=8"),
    "ring": (*_CP, "parallel.cp_method=ring"),
    "ulysses": (*_CP, "parallel.cp_method=ulysses"),
    "1f1b": (*_PP, "parallel.schedule=1f1b"),
    "interleaved": (*_PP, "parallel.schedule=interleaved-1f1b", "model.layers=8", "parallel.virtual_stages=2"),
    "full": (*_8B, "train.global_batch=16", "zero=stage3", "parallel.activation_checkpointing=full"),
    "selective": (*_8B, "train.global_batch=16", "zero=stage3", "parallel.activation_checkpointing=selective"),
    "muon": (*_DP, "zero=stage2", "optimizer=muon"),
    "adafactor": (*_DP, "zero=stage2", "optimizer=adafactor"),
    "MoE": _MOE,
    "MoE, ep": (*_MOE, "parallel.ep=4"),
    "llama-1b": ("recipe=llama-1b", "model.layers=4", "train.global_batch=16"),
    "qwen3-8b": ("recipe=qwen3-8b", "model.layers=4", "train.global_batch=16", "zero=stage3"),
    "gpt2": ("recipe=gpt2", "model.layers=4", "train.global_batch=64", "train.micro_batch=4"),
    "fp8": (*_DP, "zero=stage3", "precision=fp8", "backend.compile=on"),
}  # fmt: skip
"""Name → overrides."""


@dataclass(frozen=True)
class Row:
    """A job's step, seconds."""

    name: str
    config: ResolvedConfig
    planned: float
    played: RankTime
    plan: StepBreakdown

    @property
    def ratio(self) -> float:
        return self.played.seconds / self.planned

    def parts(self) -> str:
        """Return the parts of both, in ms."""
        played: dict[str, float] = defaultdict(float)
        for work, seconds in self.played.operations.items():
            played[work[0]] += seconds
        for (axis, _), seconds in self.played.exposed.items():
            played[f"exposed {axis}"] += seconds
        played |= {"host": self.played.host_gaps, "slowed": self.played.slowed}
        plan = {name: getattr(self.plan, name) for name in StepBreakdown.__slots__}
        return f"    played {_shown(played)}\n    plan   {_shown(plan)}"


def _shown(parts: dict[str, float]) -> str:
    return ", ".join(f"{name} {1e3 * each:.2f}" for name, each in parts.items() if each > 1e-5)


def config_of(name: str) -> ResolvedConfig:
    """Return the configuration of a row."""
    composed = compose([*_COMMON, *ROWS[name]])
    return check(composed, planned_devices(composed))


def measure(name: str, config: ResolvedConfig, result: dict[str, Any]) -> Row:
    """Return the row of a rehearsal's result."""
    times, step = times_of(config, result), predict(config).time
    return Row(name, config, step.seconds, max(times, key=lambda it: it.seconds), step.parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="rows to play; none: all")
    names = parser.parse_args().names or list(ROWS)
    for name in names:
        try:
            config = config_of(name)
            row = measure(name, config, rehearsed(config, "distinct", 2))
        except UserError as error:
            print(f"{name}: {error}", flush=True)
            continue
        print(
            f"{name}: played {duration(row.played.seconds)}, planned {duration(row.planned)}: {row.ratio:.3f}\n"
            f"{row.parts()}",
            flush=True,
        )


if __name__ == "__main__":
    main()
