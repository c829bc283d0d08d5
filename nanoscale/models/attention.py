"""Causal attention, also within documents and windows, with bounded scores and sinks.

Kernels compute the pairs that a query sees, and no mask of all pairs is in memory. Shapes: q and the result
`[batch, heads, seq, head_dim]`; k, v `[batch, kv_heads, seq, head_dim]`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.library import CustomOpDef
from torch.nn import functional as F

from nanoscale.config.schema import Model
from nanoscale.models.attention_kernels import (
    KERNELS,
    Attended,
    Limits,
    Pairs,
    accumulator,
    choose_kernel,
    has_cuda_flash,
)


class DocumentEnds(NamedTuple):
    """The documents of the whole sequences of a micro batch, by their ends."""

    ends: Tensor
    """int32 `[rows, documents]` (`Batch.ends`)."""
    longest: int
    """The tokens of the longest one."""

    @classmethod
    def of(cls, ends: np.ndarray) -> DocumentEnds:
        """Return the documents that end there, in host memory: on a device the longest would cost a wait."""
        return cls(torch.from_numpy(ends), int(np.diff(ends, prepend=0).max()))


class AttentionSpan(NamedTuple):
    """The documents of whole sequences, and a window."""

    starts: Tensor
    """int32 `[rows · documents + 1]`: the tokens before each document, rows one after the other, and their sum.
    Documents of length 0 follow the last one of a row that has fewer."""
    longest: int
    """The tokens of the longest document, or more: a kernel starts a thread block for each tile of so many
    queries of each document."""
    window: int | None = None
    """The last tokens up to each token that it sees; None: all."""

    @classmethod
    def of(cls, documents: DocumentEnds, length: int) -> AttentionSpan:
        """Return the span of documents of rows of this length."""
        ends, longest = documents
        rows = torch.arange(len(ends), dtype=torch.int32, device=ends.device) * length
        return cls(F.pad((ends + rows.unsqueeze(1)).flatten(), (1, 0)), longest)

    @classmethod
    def whole(cls, rows: int, length: int, device: torch.device) -> AttentionSpan:
        """Return rows of one document."""
        return cls(torch.arange(rows + 1, dtype=torch.int32, device=device) * length, length)

    def ends(self, rows: int, length: int) -> Tensor:
        """Return the ends of the documents of each row: int32 `[rows, documents]`."""
        first = torch.arange(rows, dtype=torch.int32, device=self.starts.device) * length
        return self.starts[1:].view(rows, -1) - first.unsqueeze(1)

    def half(self, number: int) -> AttentionSpan:
        """Return the span of the first (0) or the second (1) half of an even number of rows."""
        middle = len(self.starts) // 2
        second = self.starts[middle:] - self.starts[middle]
        return self._replace(starts=second if number else self.starts[: middle + 1])

    def limits(self, softcap: float | None = None) -> Limits:
        return Limits(self.starts, self.starts, self.longest, self.window, softcap)

    def first_seen(self, rows: int, length: int) -> Tensor:
        """Return the position of the first token that each token sees: int32 `[rows, length]`."""
        return self.limits().seen(rows, length, length, causal=True)[0].clamp(min=0)


Mask = Tensor | AttentionSpan | None
"""The tokens that each token sees: bool `[batch, 1, queries, keys]` of a KV cache, or the span
of whole sequences. None: all earlier ones."""


class CausalAttention(nn.Module):
    """Causal attention; keys and values may have fewer heads than queries."""

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.softcap, self.cuda_flash = shape.attention_softcap, has_cuda_flash()

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask = None,
        *,
        sinks: Tensor | None = None,
        sees_all: bool = False,
        softcap: float | None = None,
    ) -> Tensor:
        """Attend to earlier keys, or to the keys of the mask, or to all keys if `sees_all`.

        A sink is a score of each head, `[heads]`, of a further key whose value is 0 (OpenAI 2025,
        arXiv:2508.10925, section 2.2; Xiao et al. 2023, arXiv:2309.17453).
        """
        softcap = self.softcap if softcap is None else softcap
        plain = softcap is None and sinks is None
        if plain and not isinstance(mask, AttentionSpan):
            return F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                is_causal=mask is None and not sees_all,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        if isinstance(mask, Tensor) or sees_all:
            assert not isinstance(mask, AttentionSpan), "a cache has masks of its own"
            return dense_attention(q, k, v, mask, softcap, sinks)
        span = mask if mask is not None else AttentionSpan.whole(len(q), q.shape[2], q.device)
        kernel = choose_kernel(q, self.cuda_flash, limited=True, capped=softcap is not None)
        return limited_attention(q, k, v, span, sinks, kernel, softcap)


def limited_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    span: AttentionSpan,
    sinks: Tensor | None,
    kernel: str,
    softcap: float | None = None,
) -> Tensor:
    """Return causal attention within the documents and the window of `span`."""
    head_dim = q.shape[-1]
    q, k, v = pad_heads(kernel, q, k, v)
    settings = span.longest, kernel, head_dim**-0.5, span.window, softcap
    out = AttentionFunction.apply("attention", q, k, v, sinks, span.starts, *settings)
    return out[..., :head_dim]


def pad_heads(kernel: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    padding = -tensors[0].shape[-1] % KERNELS[kernel].head_dim_multiple
    return tuple(F.pad(x, (0, padding)) for x in tensors) if padding else tensors


_Run = Callable[..., Any]


class AttentionPasses(NamedTuple):
    """Attention's passes. Each is one operation to PyTorch: its compiler skips it, and selective activation
    checkpointing can keep its result and then neither computes nor communicates again."""

    forward: CustomOpDef
    """Q, k, v, sinks (or None), positions, settings -> out, lse."""
    backward: CustomOpDef
    """The gradient of out, q, k, v, out, lse, positions, settings -> the gradients of q, k and v."""


PASSES: dict[str, AttentionPasses] = {}
"""The passes by the names of their operations."""


def register(name: str, settings: str, attend: _Run, differentiate: _Run) -> AttentionPasses:
    """Register the operations `name` and `name_backward`, which `AttentionFunction` calls by this name.

    Args:
        settings: the positions of documents and the settings, as PyTorch's schemas write them.
        attend: q, k, v, positions, settings -> out, lse, without sinks.
        differentiate: the gradient of out, `Attended`, positions, settings -> the gradients of q, k and v.
    """

    def forward(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *rest: Any) -> Any:
        out, lse = attend(q, k, v, *rest)
        if sinks is not None:
            out, lse = merge_sinks(out, lse, sinks)
        return sequence_major(out.to(q.dtype)), lse.contiguous()

    def empty_results(q: Tensor, *_: object) -> Any:
        lse = q.new_empty(q.shape[:-1], dtype=accumulator(q.dtype))
        return empty_sequence_major(q), lse

    def backward(grad_out: Tensor, *rest: Any) -> Any:
        grads = differentiate(grad_out, Attended(*rest[:5]), *rest[5:])
        return tuple(map(sequence_major, grads))

    def empty_gradients(_: Tensor, *tensors: Any) -> Any:
        return tuple(map(empty_sequence_major, tensors[:3]))

    three = "Tensor q, Tensor k, Tensor v"
    returned = f"Tensor grad_out, {three}, Tensor out, Tensor lse"
    schema = f"({three}, Tensor? sinks, {settings}) -> (Tensor, Tensor)"
    back = f"({returned}, {settings}) -> (Tensor, Tensor, Tensor)"
    PASSES[name] = AttentionPasses(
        _operation(name, schema, forward, empty_results),
        _operation(f"{name}_backward", back, backward, empty_gradients),
    )
    return PASSES[name]


def _operation(name: str, schema: str, run: _Run, empty: _Run) -> CustomOpDef:
    operation = torch.library.custom_op(f"nanoscale::{name}", run, mutates_args=(), schema=schema)
    operation.register_fake(empty)
    return operation


class AttentionFunction(torch.autograd.Function):
    """Attention that saves q, k, v, its result and the log-sum-exp.

    Its arguments are the name of its passes and the arguments of the forward pass.
    """

    @staticmethod
    def forward(ctx: Any, name: str, *arguments: Any) -> Tensor:
        q, k, v, sinks, positions, *settings = arguments
        out, lse = PASSES[name].forward(*arguments)
        ctx.save_for_backward(q, k, v, out, lse, positions, sinks)
        ctx.name, ctx.settings = name, settings
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, sinks = ctx.saved_tensors
        grads = PASSES[ctx.name].backward(grad_out, *tensors, *ctx.settings)
        of_sinks = None
        if sinks is not None:  # result and log-sum-exp include them
            out, lse = tensors[3:5]
            weights = (sinks.to(lse.dtype).view(-1, 1) - lse).exp()
            of_sinks = -(weights * (grad_out.to(lse.dtype) * out).sum(-1)).sum((0, 2))
            of_sinks = of_sinks.to(sinks.dtype)
        return None, *grads, of_sinks, None, *[None] * len(ctx.settings)


def _pairs(starts: Tensor, longest: int, scale: float, *bounds: Any) -> Pairs:
    return Pairs(True, scale, Limits(starts, starts, longest, *bounds))


register(
    "attention",
    "Tensor starts, SymInt longest, str kernel, float scale, int? window, float? softcap",
    lambda q, k, v, starts, longest, kernel, *rest: KERNELS[kernel].forward(
        q, k, v, _pairs(starts, longest, *rest)
    ),
    lambda grad_out, whole, starts, longest, kernel, *rest: KERNELS[kernel].backward(
        grad_out, whole, _pairs(starts, longest, *rest)
    ),
)


def merge_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return result and log-sum-exp with the sinks of the heads."""
    total = torch.logaddexp(lse, sinks.to(lse.dtype).view(-1, 1))
    return out * (lse - total).exp_().unsqueeze(-1), total


def sequence_major(x: Tensor) -> Tensor:
    """Return `[batch, heads, seq, head_dim]` stored as `[batch, seq, heads, head_dim]`, as it is read."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def empty_sequence_major(x: Tensor) -> Tensor:
    return torch.empty_permuted(x.shape, (0, 2, 1, 3), dtype=x.dtype, device=x.device)


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Compute attention of new tokens of a KV cache by single operations, with all scores in memory.

    Scores are bounded by c · tanh(score / c) (Gemma Team 2024, arXiv:2408.00118, section 2).
    """
    grouped = q.unflatten(1, (k.shape[1], -1))  # [batch, kv_heads, heads / kv_heads, seq, head_dim]
    scores = (grouped @ k.unsqueeze(2).mT).to(accumulator(q.dtype)) * q.shape[-1] ** -0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask.unsqueeze(2), -torch.inf)
    if sinks is not None:
        column = sinks.to(scores.dtype).view(1, k.shape[1], -1, 1, 1)
        scores = torch.cat((scores, column.expand(*scores.shape[:-1], 1)), dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[2]].to(v.dtype)
    return (weights @ v.unsqueeze(2)).flatten(1, 2)
