"""The sizes and the execution options that decide what a block keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Shape:
    """A block and its tokens on one rank; widths are what tp leaves of them."""

    tokens: int
    """of the rank's micro batch: micro_batch · seq / cp"""
    span: int
    """keys that a query may attend to: the sequence"""
    shares: int
    """ranks that divide the tokens between the blocks (sequence parallelism)"""
    hidden: int
    q: int
    kv: int
    ffn: int
    heads: int
    rotary: int
    """numbers of the cosines and sines of all positions: seq / cp · head_dim; 0 without rope"""
    gated: bool
    layernorm: bool
    qk_norm: bool = False
    experts: int = 0
    """of all ranks; 0: one feed-forward block for all tokens"""
    own: int = 0
    """of them, those of this rank"""
    taken: int = 1
    """experts of a token"""


@dataclass(frozen=True, slots=True)
class Execution:
    """How the software runs a block, as far as memory can tell."""

    compute: int
    """bytes of a number in products"""
    stream: int
    """bytes of a number in the residual stream: autocast leaves it wide"""
    autocast: bool = False
    """every product casts its input for itself"""
    attention: Literal["flash", "scores", "math"] = "flash"
    """scores: kept after the softmax; math: the same, keys and values repeated for every head"""
    tensor_parallel: bool = False
    gathered: bool = True
    """with sequence parallelism: products keep their gathered inputs"""
    turned: bool = False
    """attention's result comes with heads outside of tokens, as rotated queries do, and is copied"""
    exchanged: bool = False
    """ulysses: heads change places with the sequence, and what comes back is another tensor"""
    composed_norm: bool = False
    """RMSNorm without a kernel of its own (CPUs): its steps are saved in fp32 or better"""
    fused: bool = False
    """pointwise operations between products are one, and are computed again from what those keep"""
    fused_activation: bool = False
    """the feed-forward's activation and gate are one operation, which keeps its inputs alone"""
    dropout: bool = False
    """masks after the output, the feed-forward and the scores"""
    offloaded: bool = False
    """what a block keeps waits on the host; not on a CPU, which has one memory and copies nothing back"""
    grouped: bool = False
    """all experts of a rank in one kernel, not one after another"""
    narrow: bool = False
    """products in 8 bits, of copies that they make for themselves"""
    gathered_keys: int = 0
    """other software: tokens whose keys and values context parallelism gathers, repeated for every head"""
    keeps_softmax_input: bool = False
    """other software: scores from before the softmax stay too, as in PyTorch before 1.11, whose
    `_softmax_backward_data` asked for them"""


Sizes = dict[str, int]
