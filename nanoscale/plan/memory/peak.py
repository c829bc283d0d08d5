"""The peak memory of every pipeline rank, part by part; of its dp, cp and tp peers the worst.

A step goes through phases (the loss, the backward pass of the last block, the end of the backward pass, the
update), each with its own sum; the highest counts, and its parts are shown. A GPU reserves more than it
allocates: PyTorch's allocator keeps a pool for every stream, and no pool ever lends to another, so reserved
memory is the sum of the peaks of the pools, and of the holes between allocations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from nanoscale.common.units import byte_size
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.plan.hardware.software import NANOSCALE, Software
from nanoscale.plan.memory.deepspeed import deepspeed_phases
from nanoscale.plan.memory.native import native_phases
from nanoscale.plan.memory.phases import MemoryPart, Phase, RankPhases
from nanoscale.plan.memory.setting import MemorySetting, setting_of
from nanoscale.plan.memory.shards import RankParameters, rank_holdings

HOLES = 0.05
"""Assumed: the share of allocated memory that PyTorch's caching allocator reserves between its blocks, since
sizes are rounded up (2 MiB for large ones) and the remainder of a freed block is too small for other tensors.
"""
CONTEXT = int(1.5 * 2**30)
"""Bytes of the CUDA context with cuBLAS, cuDNN and NCCL's channels, if the hardware's description has none."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """A pipeline rank at its peak."""

    rank: int
    stages: tuple[int, ...]
    peak: str
    """The phase of the peak."""
    allocated: int
    """Bytes, as in torch.cuda.max_memory_allocated."""
    reserved: int
    """Bytes, as in torch.cuda.max_memory_reserved."""
    context: int
    """Bytes that the device holds besides PyTorch's memory."""
    phase: Phase
    found: RankPhases

    @property
    def total(self) -> int:
        """Bytes in use on the device, as in nvidia-smi."""
        return self.reserved + self.context

    @property
    def parts(self) -> tuple[MemoryPart, ...]:
        """The allocated parts, then fragmentation and context: together the total."""
        parts = [
            MemoryPart(name, size, partial(self._explain, name, size))
            for name, size in self.phase.parts.items()
        ]
        holes = self.reserved - self.allocated
        parts.append(MemoryPart("fragmentation", holes, partial(_explain_holes, self)))
        parts.append(MemoryPart("context", self.context, partial(_explain_context, self.context)))
        return tuple(parts)

    def _explain(self, name: str, size: int) -> str:
        if not size:
            return f"none at the highest point of the step, '{self.peak}'"
        return self.found.explain(name, self.phase)

    @property
    def host(self) -> tuple[MemoryPart, ...]:
        """The parts in host memory."""
        return tuple(
            MemoryPart(name, size, partial("{} of this rank that wait in host memory".format, name))
            for name, size in self.found.host
            if size
        )

    def part(self, name: str) -> MemoryPart:
        return next(part for part in self.parts if part.name == name)


def rank_memory(
    config: ResolvedConfig,
    in_flight: Sequence[Sequence[int]] | None = None,
    *,
    software: Software = NANOSCALE,
    ranks: Sequence[int] | None = None,
    context_bytes: int | None = None,
) -> list[RankMemory]:
    """Return every pipeline rank's memory.

    Args:
        config: resolved by `rules.check`.
        in_flight: for each pipeline rank and each of its stages, the number of micro batches with activations
            at the peak; None: one, as without a pipeline.
        ranks: the pipeline ranks to return; None: all.
        context_bytes: bytes that the device holds besides PyTorch's memory; None: on a GPU `CONTEXT`, on a CPU
            nothing.
    """
    setting = setting_of(config, software)
    return setting_memory(setting, in_flight, ranks=ranks, context_bytes=context_bytes)


def setting_memory(
    setting: MemorySetting,
    in_flight: Sequence[Sequence[int]] | None = None,
    *,
    ranks: Sequence[int] | None = None,
    context_bytes: int | None = None,
) -> list[RankMemory]:
    """Return every pipeline rank's memory for a setting, which may be another software's."""
    phases_of = deepspeed_phases if setting.flat else native_phases
    if context_bytes is None:
        context_bytes = CONTEXT if setting.gpu else 0
    holdings = rank_holdings(setting.config, setting.shards, setting.whole_ends)
    memory = []
    for rank in range(setting.pp) if ranks is None else ranks:
        held = holdings[rank]
        flying = in_flight[rank] if in_flight is not None else [1] * len(held.stages)
        found = phases_of(setting, held, flying)
        found = replace(
            found, host=(*found.host, ("checkpoint copy", _staged(setting, held.trained)))
        )
        numbers = tuple(stage.number for stage in held.stages)
        memory.append(_highest(rank, numbers, found, setting.gpu, context_bytes))
    return memory


def _highest(
    rank: int, stages: tuple[int, ...], found: RankPhases, gpu: bool, context: int
) -> RankMemory:
    peak = max(found.phases, key=lambda phase: phase.allocated)
    allocated = peak.allocated
    reserved = allocated
    if gpu:
        own = max(phase.allocated - phase.pooled + phase.fragmented for phase in found.phases)
        reserved = int(max(allocated, own + found.pools) * (1 + HOLES))
    return RankMemory(rank, stages, peak.name, allocated, reserved, context, peak, found)


def _staged(setting: MemorySetting, held: RankParameters) -> int:
    """Return the bytes of the copy from which checkpoints are written in parallel with the training."""
    saving = setting.config.checkpoint
    if not (saving.asynchronous and (saving.every or saving.every_minutes)):
        return 0
    share = -(-held.numel // setting.shards) if setting.flat else held.shard
    return int((setting.states.weights + setting.states.optimizer) * share)


def _explain_holes(memory: RankMemory) -> str:
    return (
        f"pools of streams that do not lend to each other (of gathers and reductions "
        f"{byte_size(memory.found.pools)}), and holes of {HOLES:.0%}: {byte_size(memory.reserved)} reserved − "
        f"{byte_size(memory.allocated)} allocated"
    )


def _explain_context(context: int) -> str:
    return f"the device's context, libraries and NCCL's channels: {byte_size(context)}"
