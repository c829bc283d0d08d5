"""Kernels for attention to some of the keys, whose softmax covers more keys than these.

Shapes: q, out and their gradients `[batch, heads, queries, head_dim]`; k, v and theirs `[batch, kv_heads,
keys, head_dim]`, where kv_heads divides heads; lse `[batch, heads, queries]`.

A kernel's `forward` returns the softmax average of its block of keys and its log-sum-exp, by which blocks are
merged; its `backward` takes the out and lse of *all* keys and returns the block's share of the gradients,
which are summed. Source: Dao 2023 (FlashAttention-2, arXiv:2307.08691), section 3.1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

aten = torch.ops.aten


@dataclass(frozen=True)
class Kernel:
    forward: Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]
    """Q, k, v, causal, scale -> out, lse. A causal block has as many keys as queries."""
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    """grad_out, q, k, v, out, lse, causal, scale -> grad_q, grad_k, grad_v."""
    head_dim_multiple: int = 1


_FLASH_TYPES = (torch.float16, torch.bfloat16)
_FLASH_HEAD_DIM = 256
"""The largest that FlashAttention-2 supports (PyTorch's sdp_utils.cpp, `check_head_dim_size_flash`)."""
_FLASH_CAPABILITY = (8, 0)


def has_cuda_flash() -> bool:
    """True if this rank's GPU and this build of PyTorch have FlashAttention.

    Call it when a model is built: the compiler cannot trace PyTorch's own test of a call,
    `can_use_flash_attention`, and a block that contains it would not be compiled at all.
    """
    return (
        torch.cuda.is_available()
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability() >= _FLASH_CAPABILITY
    )


def choose_kernel(q: Tensor, cuda_flash: bool) -> str:
    """Return the name of the kernel that takes queries like `q` with the least memory."""
    if q.device.type == "cpu":
        return "flash-cpu"
    fits = q.dtype in _FLASH_TYPES and q.shape[-1] <= _FLASH_HEAD_DIM
    return "flash-cuda" if q.is_cuda and cuda_flash and fits else "portable"


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums over blocks."""
    return torch.promote_types(dtype, torch.float32)


def _portable_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    weights = _scores(q, k, causal, scale)
    # In place throughout: the scores are by far the largest tensor, and one copy of them is enough.
    highest = weights.amax(-1, keepdim=True)
    weights.sub_(highest).exp_()
    total = weights.sum(-1, keepdim=True)
    out = weights @ v.to(weights.dtype) / total
    return out.view(q.shape), (highest + total.log()).view(q.shape[:-1])


def _portable_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    kv_heads = k.shape[1]
    weights = _scores(q, k, causal, scale)
    weights.sub_(_rows(lse.unsqueeze(-1), kv_heads)).exp_()
    grad_out = _rows(grad_out.to(weights.dtype), kv_heads)
    grad_v = weights.mT @ grad_out
    # Softmax's Jacobian needs the sum of weight · gradient over all keys: it is out · grad_out.
    grad_dot_out = (grad_out * _rows(out, kv_heads)).sum(-1, keepdim=True)
    grad_scores = grad_out @ v.to(weights.dtype).mT
    grad_scores.sub_(grad_dot_out).mul_(weights).mul_(scale)
    grad_q = grad_scores @ k.to(weights.dtype)
    grad_k = grad_scores.mT @ _rows(q.to(weights.dtype), kv_heads)
    return grad_q.view(q.shape), grad_k, grad_v


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    """Return `[batch, kv_heads, heads / kv_heads · queries, keys]`, as products of at least fp32."""
    dtype = accumulator(q.dtype)
    scores = _rows(q.to(dtype) * scale, k.shape[1]) @ k.to(dtype).mT
    if causal:
        queries, keys = q.shape[2], k.shape[2]
        future = torch.ones(queries, keys, dtype=torch.bool, device=q.device).triu_(1)
        scores.unflatten(2, (-1, queries)).masked_fill_(future, -torch.inf)
    return scores


def _rows(x: Tensor, kv_heads: int) -> Tensor:
    """Reshape `[batch, heads, queries, n]` to `[batch, kv_heads, heads / kv_heads · queries, n]`.

    All queries that share a key are in one matrix, so a product with the keys expands no keys, and a product
    over the rows sums the gradients of a group of heads.
    """
    batch, _, _, width = x.shape
    return x.reshape(batch, kv_heads, -1, width)


def _flash_cuda_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
    return out, lse


def _flash_cuda_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    # Random states are read only with dropout, and lengths by sequence only with packed sequences.
    unread = torch.empty(0, dtype=torch.uint64, device=q.device)
    return aten._scaled_dot_product_flash_attention_backward(
        grad_out,
        q,
        k,
        v,
        out,
        lse.contiguous(),  # the kernel reads it by pointer and ignores the strides
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        causal,
        unread,
        unread,
        scale=scale,
    )


def _flash_cpu_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)


def _flash_cpu_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, q, k, v, out, lse, 0.0, causal, scale=scale
    )


KERNELS = {
    "portable": Kernel(_portable_forward, _portable_backward),
    "flash-cpu": Kernel(_flash_cpu_forward, _flash_cpu_backward),
    "flash-cuda": Kernel(_flash_cuda_forward, _flash_cuda_backward, head_dim_multiple=8),
}
