"""The KV cache: keys and values of earlier tokens, so that new tokens cost only their own computation.

The model itself is unchanged: a cache replaces the core of its attention, its positions and its loop over
blocks, as context parallelism does.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from nanoscale.config.schema import Model
from nanoscale.models.attention import AttentionSpan, CausalAttention, Mask
from nanoscale.models.transformer import (
    Attention,
    Block,
    LatentAttention,
    Masks,
    Rotations,
    Transformer,
    run_layers,
)


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Compute attention without cuDNN, which would plan again for every length, 20 to 100 ms each.

    Where cuDNN is the only kernel that is allowed, it stays.
    """
    cuda = torch.backends.cuda
    was_enabled = cuda.cudnn_sdp_enabled()
    cuda.enable_cudnn_sdp(was_enabled and not cuda.math_sdp_enabled())
    try:
        yield
    finally:
        cuda.enable_cudnn_sdp(was_enabled)


class Cache:
    """The KV cache of a whole model. It owns the model until another cache is created for it.

    Sequences of a batch may differ in length: each has its own positions, and never sees the others' padding.

    Args:
        max_length: the most tokens of a sequence.
    """

    def __init__(self, model: Transformer, batch: int, max_length: int) -> None:
        self.lengths = torch.zeros(batch, dtype=torch.long)
        """The number of tokens of each sequence seen so far, in host memory."""
        self.longest = 0
        """The largest of `lengths`."""
        self.positions: Tensor | None = None
        """The positions `[batch, new]` of the new tokens; None if they are the same in all sequences."""
        self.masks: Masks = (None, None)
        """The keys `[batch, 1, new, keys]` that each new token sees; None if a causal kernel needs no mask."""
        self._model = model
        self._last: Tensor | None = None
        shape = model.shape
        size = (batch, shape.kv_head_count, max_length, shape.head_width)
        for attention in self._attentions():
            # Zeros: what a mask hides must be finite, as it is multiplied by 0.
            attention.core = CachedAttention(self, shape, *attention.wo.weight.new_zeros(2, *size))
        model.token_positions = self._token_positions
        model.sequence_length = lambda _: max_length
        model.make_masks = lambda *_: self.masks  # type: ignore[method-assign]
        model.run_layers = self._run_layers

    @torch.inference_mode()
    def logits(
        self, tokens: Tensor, counts: Tensor | None = None, *, last_only: bool = False
    ) -> Tensor:
        """Return logits `[batch, seq, vocab]` of the next `[batch, seq]` tokens, or of each sequence's last one
        alone.

        `counts` `[batch]`, in host memory, is the number of tokens of each sequence; padding follows them.
        """
        new, device = tokens.shape[1], tokens.device
        counts = torch.full_like(self.lengths, new) if counts is None else counts
        self._last = (counts - 1).to(device) if last_only else None
        self._set_positions(new, device)
        with without_cudnn_attention():
            logits: Tensor = self._model(tokens)
        self.lengths = self.lengths + counts
        self.longest = int(self.lengths.max())
        return logits

    @torch.inference_mode()
    def keep(self, rows: Sequence[int]) -> None:
        """Drop all sequences except these."""
        indices = torch.tensor(rows)
        self.lengths = self.lengths[indices]
        self.longest = int(self.lengths.max())
        for attention in self._attentions():
            core = cast("CachedAttention", attention.core)
            core.keys, core.values = (
                tensor[indices.to(tensor.device)] for tensor in (core.keys, core.values)
            )

    def _attentions(self) -> Iterator[Attention | LatentAttention]:
        return (cast("Block", block).attention for block in self._model.layers.values())

    def _set_positions(self, new: int, device: torch.device) -> None:
        """Set the positions and the mask of new tokens: each sees all tokens up to itself."""
        are_equal = bool((self.lengths == self.longest).all())
        positions = self.lengths[:, None] + torch.arange(new)
        self.positions = None if are_equal else positions.to(device)
        keys, window = torch.arange(self.longest + new), self._model.shape.sliding_window
        mask: Mask = None
        if not self.longest:  # nothing is seen so far
            rows = AttentionSpan.whole(len(self.lengths), new, device)
            limited = window is not None and new > window
            self.masks = (None, rows._replace(window=window) if limited else None)
            return
        if not are_equal or new > 1:
            mask = (keys <= positions[:, :, None])[:, None].to(device)
        in_window = mask
        if window is not None and self.longest + new > window:
            seen = (keys <= positions[:, :, None]) & (keys > positions[:, :, None] - window)
            in_window = seen[:, None].to(device)
        self.masks = (mask, in_window)

    def _token_positions(self, seq: int, device: torch.device) -> Tensor:
        if self.positions is not None:
            return self.positions
        return torch.arange(self.longest, self.longest + seq, device=device)

    def _run_layers(
        self, layers: nn.ModuleDict, hidden: Tensor, rotations: Rotations, masks: Masks
    ) -> Tensor:
        hidden = run_layers(layers, hidden, rotations, masks)
        if self._last is None:
            return hidden
        return hidden.take_along_dim(self._last[:, None, None].to(hidden.device), dim=1)


class CachedAttention(CausalAttention):
    """Attention `[batch, heads, new, head_dim]` from queries of new tokens to keys and values of all tokens so
    far."""

    def __init__(self, cache: Cache, shape: Model, keys: Tensor, values: Tensor) -> None:
        super().__init__(shape)
        self._cache, self.keys, self.values = cache, keys, values

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask = None, **options: Any) -> Tensor:
        cache, past, end = self._cache, self._cache.longest, self._cache.longest + q.shape[2]
        if cache.positions is None:
            self.keys[:, :, past:end] = k
            self.values[:, :, past:end] = v
        else:
            positions = cache.positions[:, None, :, None].expand_as(k)
            self.keys.scatter_(2, positions, k)
            self.values.scatter_(2, positions, v)
        keys, values = self.keys[:, :, :end], self.values[:, :, :end]
        return super().forward(q, keys, values, mask, sees_all=bool(past), **options)
