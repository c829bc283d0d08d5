"""Fused kernels of GPUs, for tensors without numbers. PyTorch for CPUs runs several operations instead."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from nanoscale.rehearse.played.patches import Patches

aten = torch.ops.aten


def use_fused_kernels(patches: Patches) -> None:
    """Replace functions for which C++ chooses a kernel by the device of the tensors."""
    patches.wrap(F, "scaled_dot_product_attention", _attention)
    patches.wrap(F, "rms_norm", _rms_norm)
    patches.wrap(F, "softmax", _softmax)
    patches.wrap(F, "silu", _silu)
    patches.wrap(torch, "where", _where)


def update_in_place(patches: Patches) -> None:
    """Skip the update of 8-bit AdamW, which allocates nothing when it is compiled."""
    patches.replace(import_module("torchao.optim.adam"), "single_param_adam", lambda *_: None)


class _RmsNorm(torch.autograd.Function):
    """A norm with the inputs and saved tensors of CUDA's fused kernel."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return x.clone()  # which takes as long

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, weight, _ = ctx.saved_tensors
        return torch.add(x, grad), torch.empty_like(weight)


class _Silu(torch.autograd.Function):
    """SiLU whose backward pass is one kernel, as on CUDA. On `meta` it would be several operations."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (x,) = ctx.saved_tensors
        return torch.add(x, grad)


def _attention(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Replace attention by a fused kernel that stores no scores, if CUDA has one for these inputs."""
    enabled = torch.backends.cuda

    def attention(q: Any, k: Any, v: Any, attn_mask: Any = None, **options: Any) -> Any:
        if q.device.type != "cuda":
            return plain(q, k, v, attn_mask, **options)
        bias = None if attn_mask is None else _bias(attn_mask, q)
        causal, scale = options.get("is_causal", False), options.get("scale")
        half = q.dtype in (torch.bfloat16, torch.float16)
        if bias is not None and half and enabled.cudnn_sdp_enabled():
            cudnn = aten._scaled_dot_product_cudnn_attention
            return cudnn(q, k, v, bias, True, 0.0, False, scale=scale)[0]
        if bias is None and half and (enabled.flash_sdp_enabled() or enabled.cudnn_sdp_enabled()):
            flash = aten._scaled_dot_product_flash_attention
            return flash(q, k, v, 0.0, causal, scale=scale)[0]
        ungrouped = q.dtype is torch.float32 and not options.get("enable_gqa")
        if ungrouped and enabled.mem_efficient_sdp_enabled():
            efficient = aten._scaled_dot_product_efficient_attention
            return efficient(q, k, v, bias, True, 0.0, causal, scale=scale)[0]
        return plain(q, k, v, attn_mask, **options)

    return attention


def _bias(mask: Any, q: Any) -> Any:
    """Return the numbers that a fused kernel adds to the scores: PyTorch makes them of a mask of booleans."""
    bias = torch.zeros_like(mask, dtype=q.dtype)
    return bias.expand(*q.shape[:3], mask.shape[-1])


def _rms_norm(plain: Callable[..., Any]) -> Callable[..., Any]:
    def rms_norm(x: Any, shape: Any, weight: Any = None, eps: Any = None) -> Any:
        fused = x.device.type == "cuda" and weight is not None and not isinstance(weight, DTensor)
        return _RmsNorm.apply(x, weight) if fused else plain(x, shape, weight, eps)

    return rms_norm


def _silu(plain: Callable[..., Any]) -> Callable[..., Any]:
    def silu(x: Any, inplace: bool = False) -> Any:
        return _Silu.apply(x) if x.device.type == "cuda" and not inplace else plain(x, inplace)

    return silu


def _where(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Choose between tensors in place of numbers, which fake tensors would choose on another device."""

    def where(condition: Any, *values: Any, **options: Any) -> Any:
        if condition.device.type == "cuda" and all(isinstance(value, int) for value in values):
            values = tuple(torch.full((), value, device=condition.device) for value in values)
        return plain(condition, *values, **options)

    return where


def _softmax(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Replace softmax by the kernel of GPUs, which also casts its input."""

    def softmax(x: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
        if x.device.type == "cuda" and dtype is torch.float32 and x.dtype != dtype:
            return aten._softmax(x, dim, True)
        return plain(x, dim=dim, _stacklevel=_stacklevel, dtype=dtype)

    return softmax
