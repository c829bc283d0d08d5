"""One rank's share of a micro batch, and the seconds of its passes."""

from dataclasses import dataclass, fields

from nanoscale.config.schema import Model
from nanoscale.plan.hardware.hardware import NANOSCALE, Software


@dataclass(frozen=True, slots=True)
class MicroBatchShape:
    """A rank's share of a micro batch and the settings that its time depends on. The key of caches."""

    model: Model
    batch: int
    """Samples."""
    seq: int
    """Tokens of one sample."""
    tp: int
    sequence_parallel: bool
    cp: int
    cp_method: str
    kind: str
    """The dtype of the blocks' matrix products: fp8, or equal to `dtype`."""
    dtype: str
    """The dtype of all other operations."""
    compiled: bool
    recompute: str
    """none, full, or a value of `parallel.selective_keep`."""
    ep: int = 1
    attention: str = "flash"
    """The attention kernel of rows without limits: flash or cudnn."""
    document: int | None = None
    """Tokens of a document that limits attention; None: attention covers the whole sample."""
    windowed: float = 0.0
    """The share of layers with a window shorter than the sample."""
    software: Software = NANOSCALE
    fp8_recipe: str = "tensorwise"
    narrow_weights: bool = False
    """True if weights of products are gathered in 8 bits."""
    cast_share: float = 1.0
    """The share of micro batches that cast the matrices of experts to 8 bits."""
    hooks: float = 1.0
    """The CPU's time for a block with the backend's hooks over its time without them."""
    tp_overlap: bool = False
    """True if collectives of tp run during products (`parallel.sequence_parallel.fuse_with_products`)."""
    adapter_rank: int = 0
    """The rank of LoRA's adapters; 0: all weights are trained."""
    paired: bool = False
    """True if the loss is of answers, whose logits are computed twice."""
    adapted: tuple[str, ...] = ()
    """The layers of a block that have adapters."""
    dora: bool = False
    """True if the results of these layers are scaled by trained magnitudes."""
    ep_over_tp: bool = False
    """True if each rank of tp routes its own part of the sequence to whole experts."""

    @property
    def tokens(self) -> int:
        return self.batch * self.seq // self.cp

    @property
    def expert_tp(self) -> int:
        """The number of ranks that divide the width of each expert."""
        return 1 if self.ep_over_tp else self.tp

    @property
    def in_parts(self) -> bool:
        """True if attention and experts are compiled and recomputed separately (`expert.BlockInParts`)."""
        return self.ep > 1 and not self.software.fused

    @property
    def routed(self) -> int:
        """The tokens that this rank routes to experts."""
        return self.tokens * self.expert_tp // self.tp

    @property
    def stream(self) -> float:
        """This rank's tokens of the residual stream between the blocks."""
        return self.tokens / self.tp if self.sequence_parallel else self.tokens


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds of one pass of one micro batch on a rank, by kind of work."""

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
WORK = tuple(field.name for field in fields(Work))


@dataclass(frozen=True, slots=True)
class Passes:
    """The passes of one micro batch through a block, the embedding or the head."""

    forward: Work
    backward: Work
    recomputed: Work
    recomputed_flops: float
    """FLOPs of recomputed products, per micro batch and rank."""
    both: Work
    """The sum of forward and backward, without recomputation."""
    products: float
    """Seconds of the products of a backward pass, with what waits for them or for the CPU."""
    seconds: tuple[float, float, float]
    """The totals of `forward`, `backward` and `recomputed`, which a search reads often."""


def passes(
    forward: Work, backward: Work, recomputed: Work = NOTHING, flops: float = 0.0, *hidden: str
) -> Passes:
    """Return the passes; `hidden` names the communication that overlaps with products, backward."""
    products = sum(getattr(backward, name) for name in ("matmul", "launch", *hidden))
    seconds = forward.total, backward.total, recomputed.total
    both = Work(*(getattr(forward, name) + getattr(backward, name) for name in WORK))
    return Passes(forward, backward, recomputed, flops, both, products, seconds)
