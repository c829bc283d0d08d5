"""Rules of MoE and of the ranks that share the experts."""

from __future__ import annotations

import math

from nanoscale.config.rules.resolution import Resolution, counted, listed, near_divisors

_KEYS = ("model.experts_per_token", "model.balance", "model.balance_rate")


def check_experts(resolution: Resolution, dp: int) -> None:
    model, layout = resolution.config.model, resolution.config.parallel
    if model.experts == 0:
        for key in (*_KEYS, "parallel.ep"):
            resolution.refuse_idle("config", key, "model.experts=0")
        return
    if model.balance == "none":
        resolution.refuse_idle("config", "model.balance_rate", "model.balance=none")
    _check_shape(resolution)
    if layout.ep > 1:
        _check_degree(resolution, dp)


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


def _check_degree(resolution: Resolution, dp: int) -> None:
    model, layout = resolution.config.model, resolution.config.parallel
    ep, ranks = layout.ep, dp // layout.dp_replicate * layout.cp
    if model.experts % ep == 0 and ranks % ep == 0:
        return
    laws = []
    if model.experts % ep:
        laws.append(f"model.experts={model.experts}")
    if ranks % ep:
        laws.append(f"the {counted(ranks, 'rank')} that it divides, (dp/dp_replicate)·cp")
    enough = ep * layout.dp_replicate
    resolution.refuse(
        "layout",
        "parallel.ep",
        f"must divide {listed(laws)}",
        *(f"parallel.ep={n}" for n in near_divisors(math.gcd(model.experts, ranks), ep)),
        f"parallel.dp={enough}"
        if model.experts % ep == 0 and resolution.config.train.global_batch % enough == 0
        else None,
    )
