"""Rules of MoE."""

from __future__ import annotations

from nanoscale.config.rules.resolution import Resolution

_KEYS = ("model.experts_per_token", "model.balance", "model.balance_rate")


def check_experts(resolution: Resolution) -> None:
    model = resolution.config.model
    if model.experts == 0:
        for key in _KEYS:
            resolution.refuse_idle("config", key, "model.experts=0")
        return
    if model.balance == "none":
        resolution.refuse_idle("config", "model.balance_rate", "model.balance=none")
    _check_shape(resolution)


def _check_shape(resolution: Resolution) -> None:
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
