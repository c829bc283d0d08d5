"""Real ranks over gloo on the CPU that record what a rehearsal predicts: memory and collectives."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist

from nanoscale.config.resolved import ResolvedConfig
from nanoscale.parallel import process_group
from nanoscale.rehearse.life import micro_batches, play
from nanoscale.rehearse.played import collectives
from nanoscale.rehearse.played.kernels import show_ring
from nanoscale.rehearse.played.live_memory import LiveMemory
from nanoscale.rehearse.played.record import RankRecord
from nanoscale.train.job import make_engine
from tests.support.even_loads import even_loads
from tests.support.ranks import run_ranks

Program = list[tuple[list[int], tuple[str, int, str, int | None]]]
"""The members of the group, and what the members of a group have in common, of each collective in order."""


@dataclass
class Measured:
    """The memory and the collectives of a rank."""

    peak: int
    sequence: Program


class Recorder(LiveMemory):
    """Live memory that also keeps the collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.sequence: Program = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace in collectives.NAMESPACES:
            call = collectives.described(func, args)
            if call is not None:
                assert call.group is not None
                members = dist.get_process_group_ranks(call.group)
                self.sequence.append((members, (call.kind, call.bytes, call.dtype, call.peer)))
        return super().__torch_dispatch__(func, types, args, kwargs)


def measured(rank: int, configs: list[ResolvedConfig], steps: int = 2) -> list[Measured]:
    """Train each configuration for some steps, evaluate, and take the state, as a rehearsal does."""
    process_group.join(configs[0].world_size, torch.device("cpu"), 60.0)
    with even_loads() as patches:
        show_ring(patches)
        return [_measured(config, steps) for config in configs]


def _measured(config: ResolvedConfig, steps: int) -> Measured:
    gc.collect()
    recorder = Recorder()
    with recorder:
        engine = make_engine(config, torch.device("cpu"))
        for _ in range(steps):
            engine.train_step(micro_batches(config), config.optimizer.lr)
        if config.train.eval_every:
            engine.evaluate([(micro_batches(config)[0], config.train.micro_batch)])
        engine.state()
        return Measured(recorder.peak, recorder.sequence)


def rehearsed(config: ResolvedConfig, ranks: Sequence[int]) -> list[RankRecord]:
    """Play ranks of a configuration on CPUs, each in a process of its own."""
    return run_ranks(_played, len(ranks), config, list(ranks))


def _played(number: int, config: ResolvedConfig, ranks: list[int]) -> RankRecord:
    return play(config, ranks[number], 2, None)


def sequence_of(record: RankRecord) -> Program:
    """Return a record's collectives in the form of `Measured.sequence`; equal micro batches several times."""
    found: Program = []
    for repeat, calls in groupby(record.calls, key=lambda call: call.repeat):
        found += [(record.groups[call.group], call.signature) for call in calls] * repeat
    return found
