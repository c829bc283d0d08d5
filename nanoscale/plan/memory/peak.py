"""The peak memory of every pipeline rank, divided into parts. Among the rank's dp, cp and tp peers the largest
counts.

A step goes through phases (the loss, the backward pass of the last block, the end of the backward pass, the
update). The phase with the most allocated memory is the peak. PyTorch reserves more than it allocates: its
caching allocator keeps a pool of memory for every stream, and memory of one pool cannot serve another stream.
So reserved memory is the sum of the peaks of all pools, plus fragmentation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from nanoscale.common.units import byte_size
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.plan.memory.deepspeed import deepspeed_phases
from nanoscale.plan.memory.native import native_phases
from nanoscale.plan.memory.phases import MemoryPart, Phase, RankPhases
from nanoscale.plan.memory.setting import MemorySetting, setting_of
from nanoscale.plan.memory.shards import RankParameters, rank_holdings

HOLES = 0.05
"""Assumed: fragmentation as a share of allocated memory. PyTorch's caching allocator rounds sizes up (to 2 MiB
for large tensors), and the remainder of a freed block is often too small for another tensor."""
CONTEXT = int(1.5 * 2**30)
"""Bytes of the CUDA context with cuBLAS, cuDNN and NCCL's channels, if the hardware's description has none."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The memory of a pipeline rank at its peak."""

    rank: int
    stages: tuple[int, ...]
    peak: str
    """The phase of the peak."""
    allocated: int
    """Bytes, as in torch.cuda.max_memory_allocated."""
    reserved: int
    """Bytes, as in torch.cuda.max_memory_reserved."""
    context: int
    """Bytes in use on the device outside of PyTorch's allocator."""
    phase: Phase
    phases: RankPhases

    @property
    def total(self) -> int:
        """Bytes in use on the device, as in nvidia-smi."""
        return self.reserved + self.context

    @property
    def parts(self) -> tuple[MemoryPart, ...]:
        """The allocated parts, fragmentation and context, whose sum is `total`."""
        parts = [
            MemoryPart(name, size, partial(self._explain, name, size))
            for name, size in self.phase.parts.items()
        ]
        holes = self.reserved - self.allocated
        parts.append(MemoryPart("fragmentation", holes, partial(_explain_holes, self)))
        why = "the device's context, libraries and NCCL's channels: {}".format
        size = self.context
        return (*parts, MemoryPart("context", size, partial(why, byte_size(size))))

    def _explain(self, name: str, size: int) -> str:
        if not size:
            return f"none at the highest point of the step, '{self.peak}'"
        return self.phases.explain(name, self.phase)

    @property
    def host(self) -> tuple[MemoryPart, ...]:
        """The parts in host memory."""
        return tuple(
            MemoryPart(name, size, partial("{} of this rank in host memory".format, name))
            for name, size in self.phases.host
            if size
        )

    def part(self, name: str) -> MemoryPart:
        return next(part for part in self.parts if part.name == name)


def rank_memory(
    config: ResolvedConfig,
    in_flight: Sequence[Sequence[int]] | None = None,
    *,
    ranks: Sequence[int] | None = None,
    context_bytes: int | None = None,
) -> list[RankMemory]:
    """Return every pipeline rank's memory.

    Args:
        config: resolved by `rules.check`.
        in_flight: for each pipeline rank and each of its stages, the number of micro batches with activations
            at the peak; None: one, as without a pipeline.
        ranks: the pipeline ranks to return; None: all.
        context_bytes: bytes outside of PyTorch's allocator; None: `CONTEXT` on a GPU, 0 on a CPU.
    """
    setting = setting_of(config)
    phases_of = deepspeed_phases if setting.flat else native_phases
    return setting_memory(setting, in_flight, phases_of, ranks=ranks, context_bytes=context_bytes)


def setting_memory(
    setting: MemorySetting,
    in_flight: Sequence[Sequence[int]] | None,
    phases_of: Callable[[MemorySetting, RankParameters, Sequence[int]], RankPhases],
    *,
    ranks: Sequence[int] | None = None,
    context_bytes: int | None = None,
) -> list[RankMemory]:
    """Return every pipeline rank's memory from a backend's function of the phases of a rank."""
    if context_bytes is None:
        context_bytes = CONTEXT if setting.gpu else 0
    holdings = rank_holdings(setting.config, setting.shards)
    memory = []
    for rank in range(setting.pp) if ranks is None else ranks:
        params = holdings[rank]
        counts = in_flight[rank] if in_flight is not None else [1] * len(params.stages)
        phases = phases_of(setting, params, counts)
        copy = ("checkpoint copy", _checkpoint_copy(setting, params.trained))
        phases = RankPhases(phases.phases, phases.pools, (*phases.host, copy), phases.explain)
        numbers = tuple(stage.number for stage in params.stages)
        peak = max(phases.phases, key=lambda phase: phase.allocated)
        allocated = reserved = peak.allocated
        if setting.gpu:
            default = max(it.allocated - it.pooled for it in phases.phases)
            reserved = int(max(allocated, default + phases.pools) * (1 + HOLES))
        sizes = allocated, reserved, context_bytes
        memory.append(RankMemory(rank, numbers, peak.name, *sizes, peak, phases))
    return memory


def _checkpoint_copy(setting: MemorySetting, params: RankParameters) -> int:
    """Return the bytes of the copy in host memory from which checkpoints are written during the training."""
    saving = setting.config.checkpoint
    during = saving.every or saving.every_minutes or saving.keep_best
    if not (saving.asynchronous and during):
        return 0
    share = -(-params.numel // setting.shards) if setting.flat else params.shard
    moments = setting.states.moments(share, 0 if setting.flat else params.in_blocks_shard)
    return int(setting.states.weights * share) + moments


def _explain_holes(memory: RankMemory) -> str:
    return (
        f"one pool for each stream ({byte_size(memory.phases.pools)} for gathers and reductions), and holes of "
        f"{HOLES:.0%}: {byte_size(memory.reserved)} reserved − {byte_size(memory.allocated)} allocated"
    )
