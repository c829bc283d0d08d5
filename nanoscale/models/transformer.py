"""A decoder-only transformer for one device. Llama, Gemma, Qwen and GPT-2 are settings of `config.Model`.

Shapes: batch, seq, hidden; heads, kv_heads, head_dim. Nothing here knows of ranks: parallelism is applied
from outside, by parameter and module name.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nanoscale.config.schema import Model
from nanoscale.models.attention import AttentionSpan, CausalAttention, DocumentEnds, Mask
from nanoscale.models.attention_kernels import takes_narrow_values
from nanoscale.models.head import Head, TiedHead, TokenLosses
from nanoscale.models.initialization import Draw, draw
from nanoscale.models.moe import MixtureOfExperts, activations
from nanoscale.models.preferences import Objective
from nanoscale.models.rope import Rotation, rope_rotation, rotate

Rotations = tuple[Rotation, Rotation]
"""The rotation in layers that attend to all tokens, and in layers with a window."""
Masks = tuple[Mask, Mask]
"""The mask in layers that attend to all tokens, and in layers with a window."""
RunLayers = Callable[[nn.ModuleDict, Tensor, Rotations, Masks], Tensor]
"""A loop over the blocks: from the stream `[batch, seq, hidden]` to the stream."""


class Transformer(nn.Module):
    """A transformer from token ids `[batch, seq]` to logits `[batch, seq, vocab]` or to a loss, or one stage
    of it.

    A stage without the embedding takes the residual stream `[batch, seq, hidden]`, and one without the head
    returns it.
    """

    objective: Objective | None = None
    """The loss of pairs in the last stage; None: each token has a loss of its own."""
    tied_name = "embed.weight"
    """The name of a tied embedding, which both ends of a pipeline have."""
    token_losses: TokenLosses | None = None
    """The user's own loss in the last stage; None: cross-entropy."""

    def __init__(
        self,
        shape: Model,
        layers: Sequence[int] | None = None,
        *,
        first: bool = True,
        last: bool = True,
    ) -> None:
        """Create a stage, or the whole model.

        Args:
            layers: the numbers of the stage's consecutive blocks; None: all of them.
            first: True for the stage with the embedding.
            last: True for the stage with the head.
        """
        super().__init__()
        numbers = range(shape.layers) if layers is None else layers
        self.shape, self.first, self.last = shape, first, last
        self.sequence_shards = 1
        """Ranks that share the residual stream's sequence between the blocks."""
        self.sequence_length: Callable[[int], int] = lambda seq: seq
        """A function from the tokens of this rank's sequence to the whole sequence's tokens."""
        self.token_positions: Callable[[int, torch.device], Tensor] = whole_sequence
        """A function that returns the positions `[seq]` of the tokens of this rank's sequence."""
        self.run_layers: RunLayers = run_layers
        if self.first:
            self.embed: Any = nn.Embedding(shape.vocab, shape.hidden)
        elif self.last and shape.tie_embeddings:  # a copy of the first stage's, by the same name
            self.embed = Head(shape.hidden, shape.vocab, bias=False)
        if self.first and shape.position == "learned":
            self.positions = nn.Embedding(shape.max_seq_len, shape.hidden)
        # Keyed by layer number, so that a pipeline stage keeps the names of the whole model.
        self.layers = nn.ModuleDict({str(i): Block(shape.of_layer(i), i) for i in numbers})
        if self.last:
            self.norm = make_norm(shape)
            self.head: Head | TiedHead
            if shape.tie_embeddings:
                self.head = TiedHead() if self.first else self.embed
            else:
                self.head = Head(shape.hidden, shape.vocab, bias=False)
            self.head.softcap = shape.logit_softcap

    def forward(
        self,
        inputs: Tensor,
        documents: DocumentEnds | None = None,
        targets: Tensor | None = None,
        references: Tensor | None = None,
    ) -> Tensor:
        """Return logits; with `targets` `[batch, seq]` the last stage returns the sum of their losses, a
        scalar.

        With `documents`, attention stays within documents, and positions restart with each document.
        `references` `[batch]` belong to pairs.
        """
        seq = inputs.shape[1] * (1 if self.first else self.sequence_shards)
        length, positions = self.sequence_length(seq), self.token_positions(seq, inputs.device)
        masks = self.make_masks(inputs, length, documents)
        if documents is not None:
            positions = positions_in_documents(masks[0], len(inputs), length)[:, positions]
        hidden = inputs
        if self.first:
            hidden = scaled(self.embed(inputs), self.shape.embed_scale)
            if self.shape.position == "learned":
                hidden = hidden + self.positions(positions)
        rotations: Rotations = (None, None)
        if self.shape.position == "rope":
            given = self.shape, positions, hidden.dtype, length
            rotation = local = rope_rotation(*given)
            if self.shape.rope_theta_local is not None:
                local = rope_rotation(*given, local=True)
            rotations = rotation, local
        hidden = self.run_layers(self.layers, hidden, rotations, masks)
        if not self.last:
            return hidden
        hidden = scaled(self.norm(hidden), self.shape.logit_scale)
        tied = () if self.has_separate_head else (self.embed.weight,)
        return self.head(hidden, *tied, targets, references)

    @property
    def has_separate_head(self) -> bool:
        """True if embedding and head have separate parameters, which can be gathered separately."""
        return not (self.shape.tie_embeddings and self.first and self.last)

    def materialize(self, device: torch.device) -> None:
        """Allocate memory for a model on the meta device; its parameters stay uninitialized."""
        self.to_empty(device=device)
        self.reset_buffers(device)

    @torch.no_grad()
    def reset_buffers(self, device: torch.device) -> None:
        """Reset the buffers to their initial values, counters to 0, on a device."""
        for module in self.modules():
            for name, counter in module._buffers.items():
                if counter is not None:
                    module._buffers[name] = counter.to(device).zero_()

    def initializer(self, seed: int, device: torch.device) -> Draw:
        """Return the function that draws its initial weights."""
        return partial(draw, shape=self.shape, seed=seed, device=device)

    def make_masks(self, inputs: Tensor, length: int, documents: DocumentEnds | None) -> Masks:
        """Return the masks of whole sequences of this length with these documents."""
        span = None if documents is None else AttentionSpan.of(documents, length)
        window = self.shape.sliding_window
        if window is None or window >= length:
            return span, span
        every = AttentionSpan.whole(len(inputs), length, inputs.device) if span is None else span
        return span, every._replace(window=window)


def run_layers(layers: nn.ModuleDict, hidden: Tensor, rotations: Rotations, masks: Masks) -> Tensor:
    for layer in layers.values():
        hidden = layer(hidden, rotations, masks)
    return hidden


def scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else x * factor


def whole_sequence(seq: int, device: torch.device) -> Tensor:
    return torch.arange(seq, device=device)


def positions_in_documents(span: Mask, rows: int, length: int) -> Tensor:
    """Return the position of each token within its document: `[rows, length]`."""
    assert isinstance(span, AttentionSpan)
    return torch.arange(length, device=span.starts.device) - span.first_seen(rows, length)


_LATENT_EPS = 1e-6
"""Added to the variance of latents, as in DeepSeek-V3's code, whatever `norm_eps` is."""


class Block(nn.Module):
    """A transformer block: attention, then the feed-forward block, each added to the stream.

    Norms are before them, after them, or both.
    """

    def __init__(self, shape: Model, layer: int) -> None:
        super().__init__()
        before, after = shape.norm_position != "after", shape.norm_position != "before"
        self.has_window, self.rotates = shape.has_window(layer), shape.has_rotation(layer)
        self.residual_scale = shape.residual_scale
        self.attention_norm = make_norm(shape) if before else nn.Identity()
        self.attention = LatentAttention(shape) if shape.kv_rank else Attention(shape)
        self.attention_post_norm = make_norm(shape) if after else nn.Identity()
        self.mlp_norm = make_norm(shape) if before else nn.Identity()
        if shape.experts:
            shared = SwiGLU(shape, shape.shared_ffn) if shape.shared_ffn else None
            self.mlp: nn.Module = MixtureOfExperts(shape, shared)
        else:
            self.mlp = SwiGLU(shape, shape.ffn) if shape.is_gated else GeluMLP(shape)
        self.mlp_post_norm = make_norm(shape) if after else nn.Identity()

    def forward(self, hidden: Tensor, rotations: Rotations, masks: Masks) -> Tensor:
        hidden = self.attend(hidden, rotations, masks)
        return self.add_feed_forward(hidden, self.mlp(self.mlp_norm(hidden)))

    def attend(self, hidden: Tensor, rotations: Rotations, masks: Masks) -> Tensor:
        rotation = rotations[self.has_window] if self.rotates else None
        # No names for what is added: they would keep it during the feed-forward block.
        return hidden + scaled(
            self.attention_post_norm(
                self.attention(self.attention_norm(hidden), rotation, masks[self.has_window])
            ),
            self.residual_scale,
        )

    def add_feed_forward(self, hidden: Tensor, output: Tensor) -> Tensor:
        return hidden + scaled(self.mlp_post_norm(output), self.residual_scale)


class Attention(nn.Module):
    """Causal attention with grouped key and value heads (Ainslie et al. 2023, arXiv:2305.13245).

    Queries and keys may be normalized head by head (Henry et al. 2020, arXiv:2010.04245), or all heads at once.
    """

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.head_dim = shape.head_width
        kv_heads = shape.kv_head_count
        bias = shape.bias or shape.qkv_bias
        self.wq = nn.Linear(shape.hidden, shape.heads * self.head_dim, bias=bias)
        self.wk = nn.Linear(shape.hidden, kv_heads * self.head_dim, bias=bias)
        self.wv = nn.Linear(shape.hidden, kv_heads * self.head_dim, bias=bias)
        self.rope_pairs = shape.rope_pairs
        self.query_scale = 1.0
        self.sinks = nn.Parameter(torch.empty(shape.heads)) if shape.attention_sinks else None
        if shape.attention_scale is not None:  # the kernels multiply with 1/√head_dim
            self.query_scale = shape.attention_scale * math.sqrt(self.head_dim)
        self.qk_norm, self.whole_norm = shape.qk_norm, shape.qk_norm_whole
        if shape.qk_norm_whole:
            self.q_norm: nn.Module = WholeNorm(shape.q_width, eps=shape.norm_eps)
            self.k_norm: nn.Module = WholeNorm(shape.kv_width, eps=shape.norm_eps)
        elif shape.qk_norm:
            norm = RMSNorm1p if shape.norm == "rmsnorm1p" else nn.RMSNorm
            self.q_norm = norm(self.head_dim, eps=shape.norm_eps)
            self.k_norm = norm(self.head_dim, eps=shape.norm_eps)
        self.core: nn.Module = CausalAttention(shape)
        self.wo = nn.Linear(shape.heads * self.head_dim, shape.hidden, bias=shape.bias)

    def forward(self, hidden: Tensor, rotation: Rotation, mask: Mask = None) -> Tensor:
        batch, seq, _ = hidden.shape
        q, k, v = (project(hidden) for project in (self.wq, self.wk, self.wv))
        if self.whole_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        # [batch, seq, heads · head_dim] -> [batch, seq, heads, head_dim] -> [batch, heads, seq, head_dim]
        q, k, v = (x.view(batch, seq, -1, self.head_dim) for x in (q, k, v))
        if self.qk_norm and not self.whole_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None:
            q, k = (rotate(x, rotation, self.rope_pairs) for x in (q, k))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        further = {} if self.sinks is None else {"sinks": self.sinks}
        out = self.core(scaled(q, self.query_scale), k, v, mask, **further)
        return self.wo(out.transpose(1, 2).reshape(batch, seq, -1))


class LatentAttention(nn.Module):
    """Causal attention whose queries, keys and values are computed from narrow latents, with one rotated part
    of the keys for all heads (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1).

    Values are padded to the width of keys for kernels of attention that need it, which cuDNN's does not.
    """

    def __init__(self, shape: Model) -> None:
        super().__init__()
        assert shape.kv_rank is not None
        self.head_dim, self.v_dim = shape.head_width, shape.value_width
        self.widths = (shape.kv_rank, shape.rope_head_dim)
        self.plain_dim = self.head_dim - shape.rope_head_dim
        self.rope_pairs = shape.rope_pairs
        self.query_scale = (shape.attention_scale or self.head_dim**-0.5) * self.head_dim**0.5
        if shape.q_rank is not None:
            self.wq_a = nn.Linear(shape.hidden, shape.q_rank, bias=False)
            self.q_norm = nn.RMSNorm(shape.q_rank, eps=_LATENT_EPS)
        self.wq = nn.Linear(shape.q_rank or shape.hidden, shape.q_width, bias=False)
        self.wkv_a = nn.Linear(shape.hidden, sum(self.widths), bias=False)
        self.kv_norm = nn.RMSNorm(shape.kv_rank, eps=_LATENT_EPS)
        expanded = shape.heads * (self.plain_dim + self.v_dim)
        self.wkv_b = nn.Linear(shape.kv_rank, expanded, bias=False)
        self.core: nn.Module = CausalAttention(shape)
        self.narrow_values = takes_narrow_values(self.head_dim, self.v_dim)
        self.wo = nn.Linear(shape.heads * self.v_dim, shape.hidden, bias=False)

    def forward(self, hidden: Tensor, rotation: Rotation, mask: Mask = None) -> Tensor:
        batch, seq, _ = hidden.shape
        q = self.wq(self.q_norm(self.wq_a(hidden)) if hasattr(self, "wq_a") else hidden)
        latent, k_turned = self.wkv_a(hidden).split(self.widths, dim=-1)
        kv = self.wkv_b(self.kv_norm(latent))
        q = q.view(batch, seq, -1, self.head_dim)
        kv = kv.view(batch, seq, -1, self.plain_dim + self.v_dim)
        q, q_turned = q.split((self.plain_dim, self.head_dim - self.plain_dim), dim=-1)
        k, v = kv.split((self.plain_dim, self.v_dim), dim=-1)
        k_turned = k_turned.unsqueeze(2)
        if rotation is not None:
            q_turned, k_turned = (
                rotate(x, rotation, self.rope_pairs) for x in (q_turned, k_turned)
            )
        q = torch.cat((q, q_turned), dim=-1)
        k = torch.cat((k, k_turned.expand(-1, -1, k.shape[2], -1)), dim=-1)
        plain = mask is None and type(self.core) is CausalAttention and self.core.softcap is None
        narrow = plain and self.narrow_values and v.dtype in (torch.bfloat16, torch.float16)
        v = v.contiguous() if narrow else F.pad(v, (0, self.head_dim - self.v_dim))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = self.core(scaled(q, self.query_scale), k, v, mask)[..., : self.v_dim]
        return self.wo(out.transpose(1, 2).reshape(batch, seq, -1))


class SwiGLU(nn.Module):
    """A gated feed-forward block (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, shape: Model, ffn: int) -> None:
        super().__init__()
        self.activate, self.lift = activations(shape)
        self.gate = nn.Linear(shape.hidden, ffn, bias=shape.bias)
        self.up = nn.Linear(shape.hidden, ffn, bias=shape.bias)
        self.down = nn.Linear(ffn, shape.hidden, bias=shape.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(self.activate(self.gate(hidden)) * self.lift(self.up(hidden)))


class GeluMLP(nn.Module):
    """The feed-forward block of GPT-2, with its tanh approximation of GELU."""

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.up = nn.Linear(shape.hidden, shape.ffn, bias=shape.bias)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=shape.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(hidden), approximate="tanh"))


def make_norm(shape: Model) -> nn.Module:
    kinds = {"rmsnorm": nn.RMSNorm, "rmsnorm1p": RMSNorm1p, "layernorm": nn.LayerNorm}
    return kinds[shape.norm](shape.hidden, eps=shape.norm_eps)


class RMSNorm1p(nn.RMSNorm):
    """An RMSNorm whose weights are added to 1. The sum is never rounded: near 1, 16 bits keep little of a
    weight."""

    def forward(self, x: Tensor) -> Tensor:
        normalized = F.rms_norm(x, self.normalized_shape, eps=self.eps)
        return torch.addcmul(normalized, normalized, self.weight.to(x.dtype))


class WholeNorm(nn.RMSNorm):
    """An RMSNorm over all heads `[batch, seq, heads · head_dim]`; a rank may have some of the heads."""

    mean_over_ranks: Callable[[Tensor], Tensor] | None = None
    """A function from this rank's mean of squares to the mean over all heads; None: this rank has all heads."""

    def forward(self, x: Tensor) -> Tensor:
        if self.mean_over_ranks is None:
            return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean = self.mean_over_ranks(wide.square().mean(-1, keepdim=True))
        assert self.eps is not None
        return (wide * (mean + self.eps).rsqrt()).to(x.dtype) * self.weight
