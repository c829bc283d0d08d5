"""The sizes and the execution options that determine what a block keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nanoscale.config.schema import Model


@dataclass(frozen=True, slots=True)
class Shape:
    """A block and its tokens on one rank; widths are those after division by tp."""

    model: Model
    """The whole model, which says what kinds of norms, feed-forward and experts a block has."""
    tokens: int
    """Tokens of the rank's micro batch: micro_batch · seq / cp."""
    span: int
    """Keys that a query may attend to: the sequence."""
    shares: int
    """Ranks that divide the tokens between the blocks (sequence parallelism)."""
    hidden: int
    q: int
    kv: int
    ffn: int
    heads: int
    rotary: int
    """Numbers of the cosines and sines of all positions: seq / cp · head_dim; 0 without rope."""
    local_experts: int = 0
    """Experts of this rank."""
    experts_per_token: int = 1
    """Experts of a token."""
    adapter_rank: int = 0
    """Rows of LoRA's A; 0: all weights are trained."""
    adapted: tuple[str, ...] = ()
    """The products beside which there are adapters."""

    @property
    def gated(self) -> bool:
        return self.model.mlp == "swiglu"

    @property
    def layernorm(self) -> bool:
        return self.model.norm == "layernorm"

    @property
    def experts(self) -> int:
        """Experts of all ranks; 0: one feed-forward block for all tokens."""
        return self.model.experts


@dataclass(frozen=True, slots=True)
class Execution:
    """The software's way of running a block, as far as it affects memory."""

    compute: int
    """Bytes of a number in products."""
    stream: int
    """Bytes of a number in the residual stream, which autocast leaves in the parameters' dtype."""
    autocast: bool = False
    """True if every product casts its input for itself."""
    attention: Literal["flash", "scores", "math"] = "flash"
    """Scores: kept after the softmax; math: the same, with keys and values repeated for every head."""
    tensor_parallel: bool = False
    gathered: bool = True
    """True if products keep their gathered inputs, with sequence parallelism."""
    turned: bool = False
    """True if attention's result has its heads before its tokens, like rotated queries, and is copied."""
    exchanged: bool = False
    """True for ulysses: heads are exchanged for the sequence, and the returned tensor is another one."""
    composed_norm: bool = False
    """True for RMSNorm without a fused kernel (CPUs): its steps are saved in fp32 or better."""
    fused: bool = False
    """True if pointwise operations between products are fused, and recomputed from what the products keep."""
    fused_activation: bool = False
    """True if the feed-forward's activation and gate are one operation, which keeps only its inputs."""
    dropout: bool = False
    """True for dropout masks after the output, the feed-forward and the scores."""
    offloaded: bool = False
    """True if kept activations wait on the host; not on a CPU, which has one memory and copies nothing back."""
    grouped: bool = False
    """True if one kernel computes all experts of a rank."""
    narrow: bool = False
    """True for products in 8 bits, from copies that they make themselves."""
    gathered_keys: int = 0
    """Other software: tokens whose keys and values context parallelism gathers, repeated for every head."""
    keeps_softmax_input: bool = False
    """Other software: True if scores from before the softmax are kept too, as in PyTorch before 1.11, whose
    `_softmax_backward_data` needed them."""


Sizes = dict[str, int]
