"""Real ranks over gloo on the CPU that record what a rehearsal predicts: memory and collectives."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist

from nanoscale.config.layout import coordinates
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.parallel import process_group
from nanoscale.rehearse.life import play, resume
from nanoscale.rehearse.played import collectives
from nanoscale.rehearse.played.collectives import Collective
from nanoscale.rehearse.played.live_memory import LiveMemory
from nanoscale.rehearse.played.record import Call, RankRecord
from nanoscale.rehearse.rehearsed_job import Disk, ignore, shortened, training_of
from nanoscale.runs.rank_context import StopFlag
from nanoscale.train.agreement import Agreement
from nanoscale.train.job import load_initial_weights, make_engine
from tests.support.even_loads import even_loads
from tests.support.ranks import run_ranks

Signature = tuple[Any, ...]
Program = list[tuple[list[int], Signature]]
"""The members of the group, and what is communicated, of each collective in order."""


@dataclass
class Measured:
    """The memory and the collectives of a rank."""

    before_saving: int
    """The peak before the first checkpoint, which holds a copy of the whole state."""
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
                self.sequence.append((members, _about(call)))
        return super().__torch_dispatch__(func, types, args, kwargs)


def measured(rank: int, configs: list[ResolvedConfig], steps: int = 2) -> list[Measured]:
    """Train and resume each configuration for some steps, as a rehearsal does."""
    process_group.join(configs[0].world_size, torch.device("cpu"), 60.0)
    results = []
    for config in configs:
        with even_loads(moves=_is_first_of_experts(rank, config)) as patches:
            disk = Disk()
            disk.patch(patches)
            results.append(_measured(shortened(config, steps), rank, disk))
    return results


def _is_first_of_experts(rank: int, config: ResolvedConfig) -> bool:
    """Return True for the first rank of a group whose ranks have different experts."""
    parallel, own = config.parallel, coordinates(rank, config.parallel)
    columns = parallel.tp // parallel.expert_tp
    place = (own.dp * parallel.cp + own.cp) * columns + own.tp % columns
    return parallel.ep > 1 and place % parallel.ep == 0


def _measured(config: ResolvedConfig, rank: int, disk: Disk) -> Measured:
    gc.collect()
    disk.tensors = None
    recorder = Recorder()
    with recorder:
        before_saving = _train(config, rank, recorder)
        if disk.tensors is not None:
            gc.collect()
            engine = make_engine(config, torch.device("cpu"))
            assert resume(engine) == disk.tensors
        return Measured(before_saving, recorder.peak, recorder.sequence)


def _train(config: ResolvedConfig, rank: int, recorder: Recorder) -> int:
    """Train to the end; return the peak before the first checkpoint."""
    engine = make_engine(config, torch.device("cpu"))
    load_initial_weights(engine, config, ignore)
    training, _ = training_of(config, engine, rank)
    peaks: list[int] = []
    save = training.save

    def saving(*args: Any, **options: Any) -> None:
        peaks.append(recorder.peak)
        save(*args, **options)

    training.save = saving  # type: ignore[method-assign]
    training.run(Agreement(StopFlag()))
    engine.state()
    return peaks[0] if peaks else recorder.peak


def rehearsed(config: ResolvedConfig, ranks: Sequence[int]) -> list[RankRecord]:
    """Play ranks of a configuration on CPUs, each in a process of its own."""
    return run_ranks(_played, len(ranks), config, list(ranks))


def _played(number: int, config: ResolvedConfig, ranks: list[int]) -> RankRecord:
    return play(config, ranks[number], 2, None)


def before_saving(record: RankRecord) -> int:
    """Return the peak of a record before the first checkpoint."""
    later = ("checkpoint", "checkpoint thread", "between steps", "resume")
    return max(phase.peak for name, phase in record.phases.items() if name not in later)


def sequence_of(record: RankRecord) -> Program:
    """Return a record's collectives in the form of `Measured.sequence`; equal micro batches several times."""
    found: Program = []
    for repeat, calls in groupby(record.calls, key=lambda call: call.repeat):
        found += [(record.groups[call.group], _about(call)) for call in calls] * repeat
    return found


def _about(call: Collective | Call) -> Signature:
    splits = [*call.sent], [*call.received]
    return call.kind, call.bytes, call.dtype, call.peer, call.reduction, *splits
