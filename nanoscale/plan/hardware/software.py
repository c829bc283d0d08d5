"""The software that a plan is made for: nanoscale, or other software in `benchmarks.plan.software`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DTENSOR_S = 150e-6
"""Seconds of the host for an operation on DTensors: 100 to 190 µs were seen in PyTorch 2.6 to 2.9, where a few
µs suffice for plain tensors."""


@dataclass(frozen=True, slots=True, eq=False)
class Software:
    """The properties of a training engine that memory and time depend on. Compared by identity."""

    name: str
    composed_norm: bool = False
    """True if RMSNorm without a compiler consists of single operations in fp32 (PyTorch before 2.9)."""
    fused: bool = False
    """True if element-wise operations between products are fused kernels, compiled or not."""
    sums_in_products: bool = False
    """True if products add their gradients to fp32 sums themselves (Megatron-LM's
    gradient_accumulation_fusion)."""
    hidden_tp: Literal["none", "backward", "both"] = "none"
    """The passes in which the collectives of tp run in parallel with products."""
    dtensor: bool = False
    """True if tp and FSDP compute on DTensors. An operation costs the host `DTENSOR_S`. tp copies the tensors
    that it gathers or reduces, because the sequence is not their first dimension."""
    narrow_gathers: bool = False
    """True if tp gathers the inputs of 8-bit products in 8 bits, with tensor-wise scales."""
    cast_bytes: float = 6
    """Bytes moved for each number that is cast to 8 bits: read for the maximum, read again, written row-major
    and column-major. Transformer Engine takes the maximum from earlier steps and fuses half of its casts."""
    copies: Literal["expert", "rank", "host"] = "expert"
    """The copies of a token that are sent: one for each of its experts, one for each rank that has any of them,
    or one for each such host and from there to its ranks (DeepEP, arXiv:2412.19437, section 3.2.2)."""
    distributed_optimizer: bool = False
    """True for Megatron-LM's distributed optimizer. Weights in the compute dtype and gradients in fp32 are
    unsharded, master weights and moments are sharded."""


NANOSCALE = Software("nanoscale", copies="rank")
