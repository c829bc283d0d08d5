"""The software that a plan is made for: this engine, or what others have shown the hardware to reach."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DTENSOR_S = 150e-6
"""Seconds of the host for an operation on DTensors: 100 to 190 µs were seen in PyTorch 2.6 to 2.9, where a few
µs suffice for plain tensors."""


@dataclass(frozen=True, slots=True, eq=False)
class Software:
    """The differences of a training engine that memory and time depend on. Compared by identity."""

    name: str
    """The name in `plan --as NAME`."""
    about: str
    """One sentence for people."""
    composed_norm: bool = False
    """True if RMSNorm consists of single operations in fp32 where it is not compiled (PyTorch before 2.9)."""
    fused: bool = False
    """True if element-wise operations between products are fused kernels, compiled or not."""
    sums_in_products: bool = False
    """True if products add their gradients to fp32 sums themselves (Megatron-LM's
    gradient_accumulation_fusion)."""
    hidden_tp: Literal["none", "backward", "both"] = "none"
    """The passes in which the collectives of tp run in parallel with products."""
    dtensor: bool = False
    """True if tp and FSDP compute on DTensors: an operation costs the host `DTENSOR_S`, and what tp gathers or
    reduces along the sequence is copied once more, since it is not the first dimension."""
    narrow_gathers: bool = False
    """True if tp gathers the inputs of 8-bit products in 8 bits, where one scale serves a whole tensor."""
    cast_bytes: float = 6
    """Bytes per number that is cast to 8 bits: it is read for its largest, read again, and laid out twice.
    Transformer Engine knows the largest from earlier steps, and fuses half of its casts into the operations
    before them."""
    one_copy: bool = False
    """True if a token travels once to each host, and there once to each rank, that has any of its experts
    (DeepEP, arXiv:2412.19437, section 3.2.2)."""
    flat: bool = False
    """True for Megatron-LM's distributed optimizer: weights in the compute dtype and gradients in fp32 are
    whole, master weights and moments are sharded."""
    whole_logits: bool = False
    """True if all logits of a micro batch exist at once, with their gradients."""


NANOSCALE = Software(
    "nanoscale",
    "this engine: its own operations, kernels and overlaps",
)
TORCH = Software(
    "torch",
    "PyTorch-native software with FSDP2 and DTensor, such as torchtitan",
    composed_norm=True,
    dtensor=True,
    narrow_gathers=True,
)
TORCH_WHOLELOSS = Software(
    "torch-wholeloss",
    "the same, with all logits of a micro batch in memory at once",
    composed_norm=True,
    dtensor=True,
    narrow_gathers=True,
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
