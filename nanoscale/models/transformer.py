"""A decoder-only transformer for one device. Llama, Mistral, Qwen and GPT-2 are settings of `config.Model`.

Shapes: batch, seq, hidden; heads, kv_heads, head_dim. Nothing here knows of ranks: parallelism is applied
from outside, by parameter and module name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nanoscale.config.schema import Model, RopeScaling
from nanoscale.models.head import Head, TiedHead
from nanoscale.models.initialization import Draw, draw
from nanoscale.models.moe import MixtureOfExperts

Rotation = tuple[Tensor, Tensor] | None
"""Cosine and sine of every position's angles: `[seq, head_dim / 2]`, or `[batch, 1, seq, head_dim / 2]` if
rows differ; None if positions are learned."""
Mask = Tensor | None
"""Bool `[batch, 1, seq, seq]` over whole sequences: the keys that each query sees. None: all earlier ones."""
RunLayers = Callable[[nn.ModuleDict, Tensor, Rotation, Mask], Tensor]
"""A loop over the blocks: from the stream `[batch, seq, hidden]` to the stream."""


class Transformer(nn.Module):
    """A transformer from token ids `[batch, seq]` to logits `[batch, seq, vocab]` or to a loss, or one stage
    of it.

    A stage without the embedding takes the residual stream `[batch, seq, hidden]`, and one without the head
    returns it.
    """

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
        self.token_positions: Callable[[int, torch.device], Tensor] = whole_sequence
        """A function that returns the positions `[seq]` of the tokens of this rank's sequence."""
        self.run_layers: RunLayers = run_layers
        if self.first:
            self.embed = nn.Embedding(shape.vocab, shape.hidden)
        if self.first and shape.position == "learned":
            self.positions = nn.Embedding(shape.max_seq_len, shape.hidden)
        # Keyed by layer number, so that a pipeline stage keeps the names of the whole model.
        self.layers = nn.ModuleDict({str(i): Block(shape) for i in numbers})
        if self.last:
            self.norm = make_norm(shape)
            self.head = (
                TiedHead() if shape.tie_embeddings else Head(shape.hidden, shape.vocab, bias=False)
            )

    def forward(
        self, inputs: Tensor, documents: Tensor | None = None, targets: Tensor | None = None
    ) -> Tensor:
        """Return logits; with `targets` `[batch, seq]` the last stage returns the sum of their losses, a
        scalar.

        `documents` `[batch, seq]` is the document number of each token of the whole sequence (`Batch`). With
        it, attention stays within documents, and positions restart with each document.
        """
        seq = inputs.shape[1] * (1 if self.first else self.sequence_shards)
        positions = self.token_positions(seq, inputs.device)
        mask = None
        if documents is not None:
            positions = positions_in_documents(documents)[:, positions]
            mask = document_mask(documents)
        hidden = self._embed(inputs, positions) if self.first else inputs
        rotation = None
        if self.shape.position == "rope":
            rotation = rope_rotation(self.shape, positions, hidden.dtype)
        hidden = self.run_layers(self.layers, hidden, rotation, mask)
        return self._apply_head(hidden, targets) if self.last else hidden

    @property
    def has_separate_head(self) -> bool:
        """True if embedding and head have separate parameters, which can be gathered separately."""
        return not self.shape.tie_embeddings

    def materialize(self, device: torch.device) -> None:
        """Allocate memory for a model on the meta device; its parameters stay uninitialized."""
        self.to_empty(device=device)
        self.reset_buffers(device)

    @torch.no_grad()
    def reset_buffers(self, device: torch.device) -> None:
        """Reset the buffers to their initial values: counters to 0."""
        for counter in self.buffers():
            counter.zero_()

    def initializer(self, seed: int, device: torch.device) -> Draw:
        """Return the function that draws its initial weights."""
        return partial(draw, shape=self.shape, seed=seed, device=device)

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        return hidden + self.positions(positions) if self.shape.position == "learned" else hidden

    def _apply_head(self, hidden: Tensor, targets: Tensor | None) -> Tensor:
        hidden = self.norm(hidden)
        if self.shape.tie_embeddings:
            return self.head(hidden, self.embed.weight, targets)
        return self.head(hidden, targets)


def run_layers(
    layers: nn.ModuleDict, hidden: Tensor, rotation: Rotation, mask: Mask = None
) -> Tensor:
    for layer in layers.values():
        hidden = layer(hidden, rotation, mask)
    return hidden


def whole_sequence(seq: int, device: torch.device) -> Tensor:
    return torch.arange(seq, device=device)


def positions_in_documents(documents: Tensor) -> Tensor:
    """Return the position of each token within its document and row: `[batch, seq]`."""
    index = torch.arange(documents.shape[1], device=documents.device)
    starts_document = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    return index - torch.where(starts_document, index, 0).cummax(1).values


def document_mask(documents: Tensor) -> Tensor:
    """Return the causal mask within each document: bool `[batch, 1, seq, seq]`."""
    same = documents.unsqueeze(-1) == documents.unsqueeze(-2)
    return same.tril().unsqueeze(1)


class Block(nn.Module):
    """A transformer block: attention, then the feed-forward block, each with a norm before it and added to the
    stream."""

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.attention_norm = make_norm(shape)
        self.attention = Attention(shape)
        self.mlp_norm = make_norm(shape)
        self.mlp = make_mlp(shape)

    def forward(self, hidden: Tensor, rotation: Rotation, mask: Mask = None) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), rotation, mask)
        return hidden + self.mlp(self.mlp_norm(hidden))


class Attention(nn.Module):
    """Causal attention with grouped key and value heads (Ainslie et al. 2023, arXiv:2305.13245).

    Queries and keys may be normalized head by head (Henry et al. 2020, arXiv:2010.04245).
    """

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.head_dim = shape.head_width
        kv_heads = shape.kv_head_count
        bias = shape.bias or shape.qkv_bias
        self.wq = nn.Linear(shape.hidden, shape.heads * self.head_dim, bias=bias)
        self.wk = nn.Linear(shape.hidden, kv_heads * self.head_dim, bias=bias)
        self.wv = nn.Linear(shape.hidden, kv_heads * self.head_dim, bias=bias)
        self.qk_norm = shape.qk_norm
        if shape.qk_norm:
            self.q_norm = nn.RMSNorm(self.head_dim, eps=shape.norm_eps)
            self.k_norm = nn.RMSNorm(self.head_dim, eps=shape.norm_eps)
        self.core: nn.Module = CausalAttention()
        self.wo = nn.Linear(shape.heads * self.head_dim, shape.hidden, bias=shape.bias)

    def forward(self, hidden: Tensor, rotation: Rotation, mask: Mask = None) -> Tensor:
        batch, seq, _ = hidden.shape
        # [batch, seq, heads · head_dim] -> [batch, seq, heads, head_dim] -> [batch, heads, seq, head_dim]
        q, k, v = (
            project(hidden).view(batch, seq, -1, self.head_dim)
            for project in (self.wq, self.wk, self.wv)
        )
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        out = self.core(q, k, v, mask)
        return self.wo(out.transpose(1, 2).reshape(batch, seq, -1))


class CausalAttention(nn.Module):
    """Causal attention, `[batch, heads, seq, head_dim]`; keys and values may have fewer heads than queries."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask = None) -> Tensor:
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
        )


class SwiGLU(nn.Module):
    """A gated feed-forward block (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden, shape.ffn, bias=shape.bias)
        self.up = nn.Linear(shape.hidden, shape.ffn, bias=shape.bias)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=shape.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(hidden)) * self.up(hidden))


class GeluMLP(nn.Module):
    """The feed-forward block of GPT-2, with its tanh approximation of GELU."""

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.up = nn.Linear(shape.hidden, shape.ffn, bias=shape.bias)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=shape.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(hidden), approximate="tanh"))


def make_mlp(shape: Model) -> nn.Module:
    if shape.experts:
        return MixtureOfExperts(shape)
    return SwiGLU(shape) if shape.mlp == "swiglu" else GeluMLP(shape)


def make_norm(shape: Model) -> nn.Module:
    if shape.norm == "rmsnorm":
        return nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
    return nn.LayerNorm(shape.hidden, eps=shape.norm_eps)


def rope_rotation(shape: Model, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of each position's rotary angles: `Rotation` for positions `[seq]` or `[batch,
    seq]`.

    Source: Su et al. 2021, arXiv:2104.09864, eq. 15. Angles need at least fp32 to tell far positions apart.
    """
    angle_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    head_dim = shape.head_width
    exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=angle_dtype) / head_dim
    frequencies = shape.rope_theta**-exponent
    if shape.rope_scaling is not None:
        frequencies = scale_rope_frequencies(frequencies, shape.rope_scaling)
    angles = positions.to(angle_dtype).unsqueeze(-1) * frequencies
    if angles.ndim == 3:
        angles = angles.unsqueeze(1)  # all heads of a row share its angles
    return angles.cos(), angles.sin()


def scale_rope_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Slow the rotary frequencies `[head_dim / 2]` for a longer context, as Llama 3.1 does.

    Wavelengths longer than the original context allows are stretched by `factor`, short ones stay, those
    between are blended linearly in (original context / wavelength). Source: Llama 3.1's model card and the
    `rope_scaling` of its published configuration.
    """
    wavelength = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = ((scaling.original_seq_len / wavelength - low) / (high - low)).clamp(0, 1)
    return smooth * frequencies + (1 - smooth) * frequencies / scaling.factor


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate `[batch, heads, seq, head_dim]`; the pairs are (i, i + head_dim / 2), as in Hugging Face."""
    cos, sin = (angles.to(x.dtype) for angles in rotation)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
