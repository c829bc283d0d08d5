"""The work of one rank for one micro batch: the sizes that decide how long it takes."""

from __future__ import annotations

from dataclasses import dataclass, fields

from nanoscale.config.schema import Model
from nanoscale.plan.hardware.software import NANOSCALE, Software


@dataclass(frozen=True, slots=True)
class MicroBatchShape:
    """The share of a micro batch that a rank computes, and its settings. The key of the caches below."""

    model: Model
    batch: int
    """Samples."""
    seq: int
    """Tokens a sample."""
    tp: int
    sequence_parallel: bool
    cp: int
    cp_method: str
    kind: str
    """The dtype of the blocks' products."""
    wide: str
    """The dtype of everything else."""
    compiled: bool
    recompute: str
    """none, full, sqrt, attention, matmuls or every-2nd-matmul."""
    ep: int = 1
    attention: str = "flash"
    """Kernel of attention: flash or cudnn."""
    software: Software = NANOSCALE
    fp8_recipe: str = "tensorwise"
    adapter_rank: int = 0
    """Rows of LoRA's A; 0: all weights are trained."""
    adapted: tuple[str, ...] = ()
    """The layers in a block that have adapters."""

    @property
    def tokens(self) -> int:
        return self.batch * self.seq // self.cp

    @property
    def stream(self) -> float:
        """Tokens of the residual stream between the blocks."""
        return self.tokens / self.tp if self.sequence_parallel else self.tokens


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds of one pass of one micro batch on a rank, by purpose."""

    matmul: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    launch: float = 0.0
    """Seconds in which the device waits for the CPU."""
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0

    @property
    def total(self) -> float:
        computed = self.matmul + self.attention + self.elementwise + self.launch
        return computed + self.tp + self.cp + self.ep


NOTHING = Work()


def together(*works: Work) -> Work:
    """Return the sum of works."""
    return Work(*(sum(getattr(work, name) for work in works) for name in _WORK))


_WORK = tuple(field.name for field in fields(Work))


@dataclass(frozen=True, slots=True)
class Passes:
    """The passes through a part of the model."""

    forward: Work
    backward: Work
    recomputed: Work
    recomputed_flops: float
    """FLOPs of recomputed products, per micro batch and rank."""
    both: Work
    """Forward and backward."""
    seconds: tuple[float, float, float]
    """The totals of the first three, which a search reads often."""


def passes(forward: Work, backward: Work, recomputed: Work = NOTHING, flops: float = 0.0) -> Passes:
    seconds = forward.total, backward.total, recomputed.total
    return Passes(forward, backward, recomputed, flops, together(forward, backward), seconds)
