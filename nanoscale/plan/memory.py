"""Memory of every pipeline rank at its highest point, part by part; of its dp, cp and tp peers the worst.

A step goes through phases (the loss, the backward pass of the last block, the end of the backward pass, the update),
each with its own sum; the highest counts, and its parts are what is shown. What a GPU reserves is more than what is
allocated: PyTorch's allocator keeps a pool for every stream, and no pool ever lends to another, so that reserved memory
is the sum of what each of them once needed, and of the holes between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from nanoscale.config.schema import Config
from nanoscale.plan.memory_deepspeed import deepspeed_phases
from nanoscale.plan.memory_native import native_phases
from nanoscale.plan.part import Part, mib
from nanoscale.plan.phases import PARTS, Phase, RankPhases
from nanoscale.plan.setting import Setting, setting_of
from nanoscale.plan.shards import rank_stages

HOLES = 0.05
"""assumed: the share of allocated memory that PyTorch's caching allocator reserves between its blocks, since sizes are
rounded up (2 MiB for large ones) and what is left of a block that was freed fits nothing else"""
CONTEXT = int(1.5 * 2**30)
"""bytes of the CUDA context with cuBLAS, cuDNN and NCCL's channels, where the hardware's description says nothing"""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """One pipeline rank at its highest point."""

    rank: int
    stages: tuple[int, ...]
    peak: str
    """the phase of the step in which it is reached"""
    parts: tuple[Part, ...]
    """what is allocated, then fragmentation and context"""
    host: tuple[Part, ...]
    """what waits in host memory"""

    @property
    def allocated(self) -> int:
        """Bytes, as torch.cuda.max_memory_allocated counts."""
        return sum(part.bytes for part in self.parts[: len(PARTS)])

    @property
    def reserved(self) -> int:
        """Bytes, as torch.cuda.max_memory_reserved counts."""
        return sum(part.bytes for part in self.parts[: len(PARTS) + 1])

    @property
    def total(self) -> int:
        """Bytes that are in use on the device, as nvidia-smi counts."""
        return sum(part.bytes for part in self.parts)

    def part(self, name: str) -> Part:
        return next(part for part in self.parts if part.name == name)


def rank_memory(
    config: Config,
    in_flight: Sequence[Sequence[int]] | None = None,
    *,
    context_bytes: int | None = None,
) -> list[RankMemory]:
    """Every pipeline rank's memory.

    Args:
        config: resolved by `rules.check`.
        in_flight: for each pipeline rank and each of its stages, how many micro batches hold activations at the peak;
            None: one, as without a pipeline.
        context_bytes: what the device holds besides PyTorch's memory; None: on a GPU `CONTEXT`, on a CPU nothing.
    """
    return setting_memory(setting_of(config), in_flight, context_bytes=context_bytes)


def setting_memory(
    setting: Setting,
    in_flight: Sequence[Sequence[int]] | None = None,
    *,
    context_bytes: int | None = None,
) -> list[RankMemory]:
    """The same for another software's way of doing things."""
    phases_of = deepspeed_phases if setting.flat else native_phases
    if context_bytes is None:
        context_bytes = CONTEXT if setting.gpu else 0
    ranks = []
    for rank, stages in enumerate(rank_stages(setting.config, setting.whole_ends)):
        flying = in_flight[rank] if in_flight is not None else [1] * len(stages)
        found = phases_of(setting, stages, flying)
        ranks.append(_worst(rank, found, setting, context_bytes))
    return ranks


def _worst(rank: int, found: RankPhases, setting: Setting, context: int) -> RankMemory:
    peak = max(found.phases, key=_bytes)
    allocated = _bytes(peak)
    reserved = allocated
    if setting.gpu:
        own = max(_bytes(phase) - phase.pooled + phase.stranded for phase in found.phases)
        pools = own + found.pools
        reserved = int(max(allocated, pools) * (1 + HOLES))
    parts = [
        Part(name, size, partial(found.explain, name, peak))
        for name, size in zip(PARTS, peak.bytes, strict=True)
    ]
    holes = reserved - allocated
    parts.append(Part("fragmentation", holes, partial(_explain_holes, allocated, reserved, found)))
    parts.append(Part("context", context, partial(_explain_context, context)))
    host = tuple(Part(name, size, partial(str, name)) for name, size in found.host if size)
    return RankMemory(rank, found.stages, peak.name, tuple(parts), host)


def _bytes(phase: Phase) -> int:
    return sum(phase.bytes)


def _explain_holes(allocated: int, reserved: int, found: RankPhases) -> str:
    return (
        f"pools of streams that do not lend to each other (gathers and reductions {mib(found.pools)}), and holes of "
        f"{HOLES:.0%}: {mib(reserved)} reserved − {mib(allocated)} allocated"
    )


def _explain_context(context: int) -> str:
    return f"the device's context, libraries and NCCL's channels, as described: {mib(context)}"
