"""The sizes and the execution options of a block that determine its memory."""

from dataclasses import dataclass
from typing import Literal

from nanoscale.config.schema import Model


@dataclass(frozen=True, slots=True)
class Shape:
    """A block and its tokens on one rank. Widths are divided by tp."""

    model: Model
    """The model, for the kinds of norms, feed-forward and experts."""
    tokens: int
    """Tokens of the rank's micro batch: micro_batch · seq / cp."""
    span: int
    """Keys that a query may attend to: the length of the sequence."""
    shares: int
    """Ranks over which sequence parallelism divides the tokens between the blocks."""
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
    shared: int = 0
    """Inner width of the block that every token uses in addition to its experts."""
    adapter_rank: int = 0
    """The rank of LoRA's adapters; 0: all weights are trained."""
    adapted: tuple[str, ...] = ()
    """The products that have adapters."""
    dora: bool = False
    """True if their results are scaled by trained magnitudes."""
    ep_over_tp: bool = False
    """True if each rank of tp routes its own part of the sequence to whole experts."""
    in_halves: bool = False
    """True if the experts' backward pass is over for half of the tokens before the rest begins."""

    @property
    def routed(self) -> int:
        """The tokens that this rank routes to experts."""
        return self.tokens // self.shares if self.ep_over_tp else self.tokens

    @property
    def norms_before(self) -> bool:
        """True if norms are before attention and feed-forward."""
        return self.model.norm_position != "after"

    @property
    def norm_pairs(self) -> int:
        """Norms of a block, divided by two: one of attention and one of the feed-forward."""
        return 2 if self.model.norm_position == "both" else 1

    @property
    def layernorm(self) -> bool:
        return self.model.norm == "layernorm"


@dataclass(frozen=True, slots=True)
class Execution:
    """Properties of the software that computes a block, as far as they affect memory."""

    compute: int
    """Bytes of a number in products."""
    stream: int
    """Bytes of a number in the residual stream, which autocast leaves in the parameters' dtype."""
    autocast: bool = False
    """True if every product casts its input separately."""
    attention: Literal["flash", "scores", "math"] = "flash"
    """The saved tensors of attention. flash: log-sums; scores: the softmax's result; math: the softmax's
    result, and keys and values repeated for every head."""
    tensor_parallel: bool = False
    gathered: bool = True
    """True if products save their gathered inputs, with sequence parallelism."""
    exchanged: bool = False
    """True for ulysses, whose all-to-all returns a new tensor."""
    composed_norm: bool = False
    """True for RMSNorm without a fused kernel (on CPUs): its operations save tensors in fp32 or better."""
    fused: bool = False
    """True if pointwise operations between products are fused. What a product reads is saved, and what only
    pointwise operations read is computed again (the partitioner of AOTAutograd)."""
    fused_activation: bool = False
    """True if the feed-forward's activation and gate are one operation, which saves only its inputs."""
    dropout: bool = False
    """True for dropout masks after attention's output, the feed-forward and the scores."""
    offloaded: bool = False
    """True if kept activations are in host memory. False on a CPU."""
    grouped: bool = False
    """True if one kernel computes all experts of a rank."""
    fp8: bool = False
    """True for products in 8 bits, which copy their operands."""
    mxfp8: bool = False
    """True if these products cast what they read, and keep in the compute dtype, again in the backward pass."""
    tile: int = 1
    """The number of which an expert's rows are a multiple."""
    gathered_keys: int = 0
    """Other software: tokens whose keys and values context parallelism gathers, repeated for every head."""

    @property
    def narrow_inputs(self) -> bool:
        """True if the inputs of products are kept in 8 bits."""
        return self.fp8 and self.fused and not self.mxfp8


Sizes = dict[str, int]
