"""The KV cache: keys and values of earlier tokens, so that new tokens cost only their own computation.

The model itself is unchanged: a cache replaces the core of its attention, its positions and its loop over
blocks, as context parallelism does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nanoscale.models.transformer import Block, Mask, Rotation, Transformer, run_layers


@contextmanager
def decoding() -> Iterator[None]:
    """Compute attention without cuDNN, which would plan again for every length, 20 to 100 ms each.

    Where cuDNN is the only kernel that is allowed, it stays.
    """
    cuda = torch.backends.cuda
    before = cuda.cudnn_sdp_enabled()
    cuda.enable_cudnn_sdp(before and not cuda.math_sdp_enabled())
    try:
        yield
    finally:
        cuda.enable_cudnn_sdp(before)


class Cache:
    """The KV cache of a whole model. It owns the model until another cache is created for it.

    Args:
        room: the most tokens of a sequence.
    """

    def __init__(self, model: Transformer, batch: int, room: int) -> None:
        self.length = 0
        """The number of tokens seen."""
        self._model = model
        self._last_only = False
        shape, parameter = model.shape, next(model.parameters())
        head_dim = shape.head_width
        size = (batch, shape.kv_head_count, room, head_dim)
        for block in cast("list[Block]", list(model.layers.values())):
            block.attention.core = CachedAttention(self, *parameter.new_empty(2, *size))
        model.place = self._place
        model.run_layers = self._run_layers

    @torch.inference_mode()
    def logits(self, tokens: Tensor, *, last_only: bool = False) -> Tensor:
        """Return logits `[batch, seq, vocab]` of the next `[batch, seq]` tokens, or of the last of them
        alone."""
        self._last_only = last_only
        with decoding():
            found: Tensor = self._model(tokens)
        self.length += tokens.shape[1]
        return found

    def _place(self, seq: int, device: torch.device) -> Tensor:
        return torch.arange(self.length, self.length + seq, device=device)

    def _run_layers(
        self, layers: nn.ModuleDict, hidden: Tensor, rotation: Rotation, mask: Mask = None
    ) -> Tensor:
        hidden = run_layers(layers, hidden, rotation, mask)
        return hidden[:, -1:] if self._last_only else hidden


class CachedAttention(nn.Module):
    """Attention `[batch, heads, new, head_dim]` from queries of new tokens to keys and values of all tokens so
    far."""

    def __init__(self, cache: Cache, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self._cache, self._keys, self._values = cache, keys, values

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask = None) -> Tensor:
        assert mask is None, "what is written is one document"
        past, new = self._cache.length, q.shape[2]
        self._keys[:, :, past : past + new] = k
        self._values[:, :, past : past + new] = v
        k, v = self._keys[:, :, : past + new], self._values[:, :, : past + new]
        if past and new > 1:  # a new token sees the past, the new ones before it, and itself
            mask = torch.ones(new, past + new, dtype=torch.bool, device=q.device).tril(past)
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=not past,
            enable_gqa=q.shape[1] != k.shape[1],
        )
