"""Kernels for attention to some of the keys, whose softmax covers more keys than these.

Shapes: q, out and their gradients `[batch, heads, queries, head_dim]`; k, v and theirs `[batch, kv_heads,
keys, head_dim]`, where kv_heads divides heads; lse `[batch, heads, queries]`.

A kernel's `forward` returns the softmax average of its block of keys and its log-sum-exp, by which blocks are
merged; its `backward` takes the out and lse of *all* keys and returns the block's share of the gradients,
which are summed. Source: Dao 2023 (FlashAttention-2, arXiv:2307.08691), section 3.1.

`Limits` divide the rows of a batch into documents, whose masked pairs are not computed. Queries without a key
have an lse of -inf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten


class Limits(NamedTuple):
    """The keys that queries see, next to the causal limit."""

    queries: Tensor
    """int32 `[documents + 1]`: the queries before each document, rows one after the other, and their sum."""
    keys: Tensor
    """The same for keys. Documents without queries or without keys are allowed."""
    longest: int
    """The most tokens of a document, or more."""
    window: int | None = None
    """The last tokens up to each query that it sees, in a causal block; None: all."""
    softcap: float | None = None
    """The bound c of scores, as c · tanh(score / c)."""

    def seen(self, batch: int, queries: int, keys: int, causal: bool) -> tuple[Tensor, Tensor]:
        """Return the first key that each query sees, and the end of these keys: int32 `[batch, queries]`."""
        index = torch.arange(batch * queries, dtype=torch.int32, device=self.queries.device)
        document = torch.searchsorted(self.queries[1:], index, right=True)
        row, own = index // queries, index % queries + 1 + keys - queries
        first, end = (self.keys[document + side] - row * keys for side in (0, 1))
        if causal:
            end = torch.minimum(end, own)
        if self.window is not None:
            first = torch.maximum(first, own - self.window)
        return first.view(batch, queries), end.view(batch, queries)


class Pairs(NamedTuple):
    """The pairs of queries and keys that attention computes, and the factor of their scores."""

    causal: bool
    """The last keys of a causal block are its queries' own; without limits it has no earlier keys."""
    scale: float
    limits: Limits | None = None


class Attended(NamedTuple):
    """Attention's arguments and results, from which gradients are computed."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor

    def block(self, queries: slice, keys: slice) -> Attended:
        q, out, lse = (x[:, :, queries] for x in (self.q, self.out, self.lse))
        return Attended(q, self.k[:, :, keys], self.v[:, :, keys], out, lse)


Gradients = tuple[Tensor, Tensor, Tensor]
"""The gradients of q, k and v."""


@dataclass(frozen=True)
class Kernel:
    forward: Callable[[Tensor, Tensor, Tensor, Pairs], tuple[Tensor, Tensor]]
    """Q, k, v -> out, lse."""
    backward: Callable[[Tensor, Attended, Pairs], Gradients]
    """The gradient of out -> the gradients of q, k and v."""
    head_dim_multiple: int = 1


_FUSED_TYPES = (torch.float16, torch.bfloat16)
_FLASH_HEAD_DIM = 256
"""The largest that FlashAttention-2 supports (PyTorch's sdp_utils.cpp, `check_head_dim_size_flash`)."""
_FLASH_CAPABILITY = (8, 0)
_CUDNN_HEAD_DIM = 128
"""The largest for which PyTorch uses cuDNN, forward and backward."""
_CUDNN_BACKEND = 3
"""The number of cuDNN in torch.nn.attention.SDPBackend."""


def has_cuda_flash() -> bool:
    """True if this rank's GPU and this build of PyTorch have FlashAttention.

    Call it when a model is built: the compiler cannot trace PyTorch's own test of a call,
    `can_use_flash_attention`, and a block that contains it would not be compiled at all.
    """
    return (
        torch.cuda.is_available()
        and torch.backends.cuda.is_flash_attention_available()
        and torch.backends.cuda.flash_sdp_enabled()
        and torch.cuda.get_device_capability() >= _FLASH_CAPABILITY
    )


def has_cudnn() -> bool:
    """True if cuDNN's attention is the fastest of this rank's GPU, as on Hopper and Blackwell. Call it when a
    model is built."""
    return (
        torch.cuda.is_available()
        and torch.version.hip is None
        and torch.backends.cuda.cudnn_sdp_enabled()
        and ((capability := torch.cuda.get_device_capability()) == (9, 0) or capability[0] == 10)
    )


def takes_narrow_values(key_width: int, value_width: int) -> bool:
    """True if PyTorch itself chooses cuDNN's attention for values of this width, narrower than keys, as for 192
    and 128 from cuDNN 9.15.1 on (sdp_utils.cpp). Call it when a model is built."""
    if key_width == value_width or not has_cudnn():
        return False

    def sample(width: int) -> Tensor:
        shape = 1, 1, 128, width
        return torch.empty(shape, dtype=torch.bfloat16, device="cuda", requires_grad=True)

    q, k, v = sample(key_width), sample(key_width), sample(value_width)
    return torch._fused_sdp_choice(q, k, v, None, 0.0, True) == _CUDNN_BACKEND


def choose_kernel(
    q: Tensor, cuda_flash: bool, *, limited: bool = False, capped: bool = False, cudnn: bool = False
) -> str:
    """Return the name of the fastest kernel that takes queries like `q`, and `Limits`, and returns the lse."""
    if q.device.type == "cpu":
        return "portable" if limited or capped else "flash-cpu"
    fused = q.is_cuda and q.dtype in _FUSED_TYPES and not capped
    if fused and cudnn and not limited and q.shape[-1] <= _CUDNN_HEAD_DIM:
        return "cudnn"
    return "flash-cuda" if fused and cuda_flash and q.shape[-1] <= _FLASH_HEAD_DIM else "portable"


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums over blocks."""
    return torch.promote_types(dtype, torch.float32)


def _portable_forward(q: Tensor, k: Tensor, v: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
    if pairs.limits is None:
        return _block_forward(q, k, v, _future(q) if pairs.causal else None, pairs)
    blocks = [
        _block_forward(q[:, :, rows], k[:, :, keys], v[:, :, keys], hidden, pairs)
        for rows, keys, hidden in _blocks(q, k, pairs)
    ]
    out, lse = zip(*blocks, strict=True)
    return torch.cat(out, 2), torch.cat(lse, 2)


def _portable_backward(grad_out: Tensor, whole: Attended, pairs: Pairs) -> Gradients:
    if pairs.limits is None:
        hidden = _future(whole.q) if pairs.causal else None
        return _block_backward(grad_out, whole, hidden, pairs)
    q, k, v = whole[:3]
    grads = tuple(torch.zeros_like(x, dtype=accumulator(q.dtype)) for x in (q, k, v))
    for rows, keys, hidden in _blocks(q, k, pairs):
        block = _block_backward(grad_out[:, :, rows], whole.block(rows, keys), hidden, pairs)
        for grad, part, block_grad in zip(grads, (rows, keys, keys), block, strict=True):
            grad[:, :, part] += block_grad
    grad_q, grad_k, grad_v = (grad.to(q.dtype) for grad in grads)
    return grad_q, grad_k, grad_v


_QUERIES = 256
"""Queries of a block of the portable kernel."""


def _blocks(q: Tensor, k: Tensor, pairs: Pairs) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield blocks of queries, the keys that they may see, and bools `[batch, queries, keys]`, True for hidden
    pairs."""
    batch, queries, keys = q.shape[0], q.shape[2], k.shape[2]
    causal, limits = pairs.causal, pairs.limits
    assert limits is not None
    first, end = limits.seen(batch, queries, keys, causal)
    for start in range(0, queries, _QUERIES):
        rows = slice(start, min(start + _QUERIES, queries))
        unseen = start + 1 + keys - queries - (limits.window or keys)
        lowest, highest = (max(0, unseen), rows.stop + keys - queries) if causal else (0, keys)
        if type(first) is Tensor and first.device.type == "cpu":  # the host need not wait
            lowest = min(int(first[:, rows].min().clamp(min=0)), keys - 1)
            highest = max(int(end[:, rows].max()), lowest + 1)
        index = torch.arange(lowest, highest, device=q.device)
        hidden = (index < first[:, rows, None]) | (index >= end[:, rows, None])
        yield rows, slice(lowest, highest), hidden


def _future(q: Tensor) -> Tensor:
    return torch.ones(1, *2 * q.shape[2:3], dtype=torch.bool, device=q.device).triu_(1)


def _block_forward(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, pairs: Pairs
) -> tuple[Tensor, Tensor]:
    weights = _scores(q, k, hidden, pairs)
    # In place throughout: the scores are by far the largest tensor, and one copy of them is enough.
    highest = weights.amax(-1, keepdim=True).clamp_(min=torch.finfo(weights.dtype).min)
    weights.sub_(highest).exp_()
    total = weights.sum(-1, keepdim=True)
    out = _product(weights, v, q) / total.clamp(min=torch.finfo(weights.dtype).tiny)
    return out.view(q.shape), (highest + total.log()).view(q.shape[:-1])


def _block_backward(
    grad_out: Tensor, block: Attended, hidden: Tensor | None, pairs: Pairs
) -> Gradients:
    q, k, v, out, lse = block
    kv_heads, softcap = k.shape[1], _softcap(pairs)
    weights = _scores(q, k, hidden, pairs)
    # The derivative of c · tanh(s / c) is 1 - tanh², and a hidden pair's weight is 0.
    slope = None if softcap is None else 1 - (weights / softcap).square_().clamp_(max=1)
    weights.sub_(_rows(lse.unsqueeze(-1), kv_heads)).exp_()
    grad_out = _rows(grad_out.to(weights.dtype), kv_heads)
    grad_v = _product(weights.mT, grad_out, q)
    # Softmax's Jacobian needs the sum of weight · gradient over all keys: it is out · grad_out.
    grad_dot_out = (grad_out * _rows(out, kv_heads)).sum(-1, keepdim=True)
    grad_scores = _product(grad_out, v.mT, q)
    grad_scores.sub_(grad_dot_out).mul_(weights).mul_(pairs.scale)
    if slope is not None:
        grad_scores.mul_(slope)
    grad_q = _product(grad_scores, k, q)
    grad_k = _product(grad_scores.mT, _rows(q, kv_heads), q)
    return grad_q.view(q.shape), grad_k, grad_v


def _softcap(pairs: Pairs) -> float | None:
    return pairs.limits.softcap if pairs.limits else None


def _scores(q: Tensor, k: Tensor, hidden: Tensor | None, pairs: Pairs) -> Tensor:
    """Return `[batch, kv_heads, heads / kv_heads · queries, keys]`, as products of at least fp32."""
    scores = _product(_rows(q, k.shape[1]), k.mT, q).mul_(pairs.scale)
    if (softcap := _softcap(pairs)) is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    if hidden is not None:
        by_head = scores.unflatten(2, (-1, q.shape[2]))
        by_head.masked_fill_(hidden[:, None, None], -torch.inf)
    return scores


def _product(a: Tensor, b: Tensor, q: Tensor) -> Tensor:
    """Return a · b in at least fp32. A GPU multiplies in the dtype of `q`: its products in 16 bits are fast."""
    dtype = q.dtype if q.is_cuda else accumulator(q.dtype)
    return (a.to(dtype) @ b.to(dtype)).to(accumulator(q.dtype))


def _rows(x: Tensor, kv_heads: int) -> Tensor:
    """Reshape `[batch, heads, queries, n]` to `[batch, kv_heads, heads / kv_heads · queries, n]`.

    All queries that share a key are in one matrix, so a product with the keys expands no keys, and a product
    over the rows sums the gradients of a group of heads.
    """
    batch, _, _, width = x.shape
    return x.reshape(batch, kv_heads, -1, width)


def _flash_cuda_forward(q: Tensor, k: Tensor, v: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
    causal, scale, limits = pairs
    if limits is None:
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
        return out, lse
    lengths, only_causal, window = _flash_limits(q, k, causal, limits)
    out, lse, *_ = aten._flash_attention_forward(
        *map(_pack, (q, k, v)), *lengths, only_causal, False, scale=scale, **window
    )
    lse = lse.unflatten(1, (len(q), -1)).transpose(0, 1)
    if not causal:  # the kernel's lse of no keys is inf
        lse = lse.masked_fill(lse == torch.inf, -torch.inf)
    return _unpack(out, len(q)), lse


def _flash_cuda_backward(grad_out: Tensor, whole: Attended, pairs: Pairs) -> Gradients:
    (q, k, v, out, lse), (causal, scale, limits) = whole, pairs
    # Random states are read only with dropout.
    unread = torch.empty(0, dtype=torch.uint64, device=q.device)
    if limits is None:
        tensors = (grad_out, *whole[:4], lse.contiguous())  # the kernel ignores the strides of lse
        return aten._scaled_dot_product_flash_attention_backward(
            *tensors, None, None, q.shape[2], k.shape[2], 0.0, causal, unread, unread, scale=scale
        )
    lse = lse.transpose(0, 1).flatten(1).contiguous()
    lengths, only_causal, window = _flash_limits(q, k, causal, limits)
    grads = aten._flash_attention_backward(
        *map(_pack, (grad_out, q, k, v, out)),
        lse,
        *lengths,
        only_causal,
        unread,
        unread,
        scale=scale,
        **window,
    )
    grad_q, grad_k, grad_v = (_unpack(grad, len(q)) for grad in grads)
    return grad_q, grad_k, grad_v


def _flash_limits(
    q: Tensor, k: Tensor, causal: bool, limits: Limits
) -> tuple[tuple[Any, ...], bool, dict[str, int]]:
    """Return FlashAttention's lengths and dropout, `is_causal` and window: a window that ends at the query is
    causal, too."""
    longest = (min(x.shape[2], limits.longest) for x in (q, k))
    lengths = (limits.queries, limits.keys, *longest, 0.0)
    if limits.window is None:
        return lengths, causal, {"window_size_left": -1, "window_size_right": -1}
    assert causal, "a window ends at the query"
    return lengths, False, {"window_size_left": limits.window - 1, "window_size_right": 0}


def _pack(x: Tensor) -> Tensor:
    """Reshape `[batch, heads, seq, head_dim]` to `[batch · seq, heads, head_dim]`."""
    return x.transpose(1, 2).flatten(0, 1)


def _unpack(x: Tensor, batch: int) -> Tensor:
    return x.unflatten(0, (batch, -1)).transpose(1, 2)


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
    numbers = (None, True, 0.0, pairs.causal)
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, *numbers, scale=pairs.scale)
    return out, lse.squeeze(-1)


def _cudnn_backward(grad_out: Tensor, whole: Attended, pairs: Pairs) -> Gradients:
    q, k, _, _, lse = whole
    unread = torch.empty((), dtype=torch.int64, device=q.device)  # random states, without dropout
    tensors = (grad_out, *whole[:4], lse.contiguous().unsqueeze(-1), unread, unread)
    numbers = (None, None, None, q.shape[2], k.shape[2], 0.0, pairs.causal)
    return aten._scaled_dot_product_cudnn_attention_backward(*tensors, *numbers, scale=pairs.scale)


def _flash_cpu_forward(q: Tensor, k: Tensor, v: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
    forward = aten._scaled_dot_product_flash_attention_for_cpu
    return forward(q, k, v, 0.0, pairs.causal, scale=pairs.scale)


def _flash_cpu_backward(grad_out: Tensor, whole: Attended, pairs: Pairs) -> Gradients:
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    return backward(grad_out, *whole, 0.0, pairs.causal, scale=pairs.scale)


KERNELS = {
    "portable": Kernel(_portable_forward, _portable_backward),
    "flash-cpu": Kernel(_flash_cpu_forward, _flash_cpu_backward),
    "flash-cuda": Kernel(_flash_cuda_forward, _flash_cuda_backward, head_dim_multiple=8),
    "cudnn": Kernel(_cudnn_forward, _cudnn_backward, head_dim_multiple=8),
}
