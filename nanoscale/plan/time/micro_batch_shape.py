"""The work of one rank for one micro batch: the sizes that decide how long it takes."""

from __future__ import annotations

from dataclasses import dataclass

from nanoscale.config.schema import Model


@dataclass(frozen=True, slots=True)
class Slice:
    """What of a micro batch a rank computes, and how. The key of the caches below."""

    model: Model
    batch: int
    """samples"""
    seq: int
    """tokens a sample"""
    tp: int
    sequence_parallel: bool
    cp: int
    cp_method: str
    kind: str
    """type of the blocks' products"""
    wide: str
    """type of everything else"""
    compiled: bool
    recompute: str
    """none, full, sqrt, attention, matmuls or every-2nd-matmul"""
    composed_norm: bool = False
    """other software: RMSNorm as single operations in fp32, as PyTorch before 2.9 has it where it is not
    compiled"""
    ep: int = 1
    attention: str = "flash"
    """kernel of attention: flash or cudnn"""
    megatron: bool = False
    """Megatron-LM since 2022: backward, collectives of column-split products run beside products, and products
    add their gradients to fp32 sums themselves (its options gradient_accumulation_fusion and
    async_tensor_model_parallel_allreduce)"""

    @property
    def tokens(self) -> int:
        return self.batch * self.seq // self.cp

    @property
    def stream(self) -> float:
        """Tokens of the residual stream between the blocks."""
        return self.tokens / self.tp if self.sequence_parallel else self.tokens
