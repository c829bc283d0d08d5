"""The software that a plan is made for: nanoscale or another engine (`plan --as`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

DTENSOR_S = 150e-6
"""Seconds of the host for an operation on DTensors: 100 to 190 µs were seen in PyTorch 2.6 to 2.9, where a few
µs suffice for plain tensors."""


@dataclass(frozen=True, slots=True, eq=False)
class Software:
    """The properties of a training engine that memory and time depend on. Compared by identity."""

    name: str
    """The name in `plan --as NAME`."""
    about: str
    """One sentence for people."""
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
    one_copy: bool = False
    """True if a token is sent once to each host that has one of its experts, and within the host once to each
    such rank (DeepEP, arXiv:2412.19437, section 3.2.2)."""
    flat: bool = False
    """True for Megatron-LM's distributed optimizer. Weights in the compute dtype and gradients in fp32 are
    unsharded, master weights and moments are sharded."""
    whole_logits: bool = False
    """True if all logits of a micro batch exist at once, with their gradients."""


NANOSCALE = Software("nanoscale", "this engine: its own operations, kernels and overlaps")
TORCH = Software(
    "torch",
    "PyTorch-native software with FSDP2 and DTensor, such as torchtitan",
    composed_norm=True,
    dtensor=True,
    narrow_gathers=True,
)
TORCH_WHOLELOSS = replace(
    TORCH,
    name="torch-wholeloss",
    about="the same, with all logits of a micro batch in memory at once",
    whole_logits=True,
)
MEGATRON = Software(
    "megatron",
    "Megatron-LM or NeMo with Transformer Engine: what the hardware has been shown to reach",
    fused=True,
    one_copy=True,
    sums_in_products=True,
    hidden_tp="both",
    narrow_gathers=True,
    cast_bytes=3,
    flat=True,
    whole_logits=True,
)
RECORDS = {record.name: record for record in (NANOSCALE, TORCH, TORCH_WHOLELOSS, MEGATRON)}
"""The records by name."""
