"""Rules of the model's shape, and of MoE."""

from __future__ import annotations

from dataclasses import replace

from nanoscale.config.hf.pretrained import absolute_name
from nanoscale.config.rules.resolution import Resolution, near_divisors
from nanoscale.config.schema import Model


def resolve_model(resolution: Resolution) -> Model:
    """Return the model with its heads resolved; transformers resolves those of its own models."""
    model = resolution.config.model
    if model.source == "hf":
        _positions(resolution, model)
        name, begin = absolute_name(model.name), model.init_from
        begin = absolute_name(begin) if begin is not None else None
        return replace(model, name=name, init_from=begin)
    kv_heads = model.kv_head_count
    if model.heads % kv_heads:
        resolution.refuse(
            "config",
            "model.kv_heads",
            f"must divide model.heads={model.heads}",
            *(f"model.kv_heads={n}" for n in near_divisors(model.heads, kv_heads)),
        )
    head_dim = model.head_width
    if model.head_dim is None and model.hidden % model.heads:
        resolution.refuse(
            "config",
            "model.heads",
            f"must divide model.hidden={model.hidden} unless model.head_dim is set",
            *(f"model.heads={n}" for n in near_divisors(model.hidden, model.heads)),
        )
    elif model.position == "rope" and head_dim % 2:
        resolution.refuse(
            "config",
            "model.head_dim" if model.head_dim else "model.heads",
            f"makes heads {head_dim} wide, and rotary positions turn pairs: an even width is needed",
            f"model.head_dim={head_dim + 1}",
            f"model.head_dim={head_dim - 1}" if head_dim > 1 else None,
        )
    _positions(resolution, model)
    if model.bias:
        resolution.refuse_idle("config", "model.qkv_bias", "model.bias=true")
    init_from = model.init_from
    if init_from is not None:
        init_from = absolute_name(init_from)
    return replace(model, kv_heads=kv_heads, head_dim=max(1, head_dim), init_from=init_from)


def _positions(resolution: Resolution, model: Model) -> None:
    length = resolution.config.train.seq_len
    if length > model.max_seq_len:
        resolution.refuse(
            "config",
            "train.seq_len",
            f"is longer than the model allows (model.max_seq_len={model.max_seq_len})",
            f"train.seq_len={model.max_seq_len}",
            f"model.max_seq_len={length}" if model.source == "own" else None,
        )
    window = model.sliding_window
    if window is not None and length > window:
        resolution.refuse(
            "config",
            "train.seq_len",
            f"is longer than model.sliding_window={window}, and attention here covers the whole sequence",
            f"train.seq_len={window}",
        )
    scaling = model.rope_scaling
    if scaling is None:
        return
    if model.position != "rope":
        resolution.refuse(
            "config",
            "model.position",
            "has no rotary frequencies for model.rope_scaling to stretch",
            "model.rope_scaling=null",
        )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        key = "model.rope_scaling.high_freq_factor"
        message = f"must be above low_freq_factor={scaling.low_freq_factor:g}"
        resolution.refuse("config", key, message, f"{key}={scaling.low_freq_factor * 4:g}")


# --- MoE ------------------------------------------------------------------------------------------

_MOE_KEYS = ("model.experts_per_token", "model.balance", "model.balance_rate")


def check_experts(resolution: Resolution) -> None:
    model = resolution.config.model
    if model.experts == 0:
        for key in _MOE_KEYS:
            resolution.refuse_idle("config", key, "model.experts=0")
        return
    if model.balance == "none":
        resolution.refuse_idle("config", "model.balance_rate", "model.balance=none")
    _check_expert_shape(resolution)


def _check_expert_shape(resolution: Resolution) -> None:
    model = resolution.config.model
    if model.experts_per_token > model.experts:
        resolution.refuse(
            "config",
            "model.experts_per_token",
            f"is more than model.experts={model.experts}",
            f"model.experts_per_token={min(2, model.experts)}",
            f"model.experts={model.experts_per_token}",
        )
    if model.mlp != "swiglu":
        message = "is the block of a dense model; experts are gated"
        resolution.refuse("config", "model.mlp", message, "model.mlp=swiglu")
    if model.bias:
        message = "gives every linear layer a bias, and experts have none"
        resolution.refuse("config", "model.bias", message, "model.bias=false")
    if resolution.config.precision.fp8:
        message = "would leave the products of the experts, which are most of them, in 16 bits"
        resolution.refuse("config", "precision.fp8", message, "precision.fp8=false")
