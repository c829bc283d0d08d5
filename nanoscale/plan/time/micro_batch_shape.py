"""The work of one rank for one micro batch: the sizes that decide how long it takes."""

from __future__ import annotations

from dataclasses import dataclass

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
