"""AdamW on the local shards of parameters, with moments and weights of any dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from nanoscale.backends import one_pass
from nanoscale.backends.gradients import local_tensor
from nanoscale.config.optimizers import ROUNDED_AT_ONCE
from nanoscale.models.initialization import local_region, parameter_seed


class LocalAdamW(AdamW):
    """AdamW on the local shard of every parameter, which suffices for an element-wise update.

    Updated as DTensors, 288 parameters took 11 to 14 ms of the host's time a step, and 0.7 to 0.9 s in the
    first one, in which PyTorch determines the sharding of each; local shards take 5 ms, and 23 ms in the
    first.
    """

    def _init_group(self, group: dict[str, Any], *tensor_lists: list[Tensor]) -> bool:
        """Let PyTorch fill the lists of the update, and replace their entries by local tensors."""
        has_complex: bool = super()._init_group(group, *tensor_lists)
        for tensors in tensor_lists:
            tensors[:] = [local_tensor(tensor) for tensor in tensors]
        return has_complex


class RoundedAdamW(Optimizer):
    """AdamW that computes in fp32 and rounds what is kept in bf16, moments or weights, stochastically.

    Rounded to the nearest number, a weight whose updates are below 1/512 of it would never change, and a
    second moment with `beta2` above 0.998 neither. At random, a number becomes one of its two neighbors, with
    its own value as the mean (Gupta et al. 2015, arXiv:1502.02551). The random numbers depend on the name of
    the parameter, the shard's position, the element and the step alone: replicas stay equal, and a resume
    continues bit for bit.
    """

    def __init__(
        self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        """Create it for groups that have the `names` of their parameters."""
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    def initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of a parameter before its first update."""
        moments = {
            name: torch.zeros_like(parameter, dtype=torch.bfloat16)
            for name in ("exp_avg", "exp_avg_sq")
        }
        return {"step": torch.zeros((), device=parameter.device), **moments}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for name, parameter in zip(group["names"], group["params"], strict=True):
                state = self.state[parameter]
                if not state:
                    state.update(self.initial_state(parameter))
                numbers = group["lr"], group["weight_decay"], group["eps"], *group["betas"]
                count = state["step"].double() + 1
                corrections = [(1 - beta**count).float() for beta in group["betas"]]
                tensors = (parameter, state["exp_avg"], state["exp_avg_sq"], parameter.grad)
                local = [local_tensor(tensor).view(-1) for tensor in tensors]
                # Compiled, an update needs no memory. On CPUs its tensors stay in the cache.
                size = max(1, len(local[0])) if local[0].is_cuda else ROUNDED_AT_ONCE
                chunks = zip(*(tensor.split(size) for tensor in local), strict=True)
                for number, (*targets, gradient) in enumerate(chunks):
                    seed = _seed(name, parameter, number)
                    inputs = [gradient, state["step"], *corrections]
                    one_pass.run(_update, self, targets, inputs, *numbers, seed)
                one_pass.keep(state["step"], state["step"] + 1, one_pass.flag(self))


def _seed(name: str, parameter: Tensor, chunk: int) -> int:
    start = local_region(parameter)[0] if isinstance(parameter, DTensor) else ()
    return parameter_seed(chunk, f"{name}:{start}") & 0x7FFFFFFF


def _update(
    weights: Tensor, first: Tensor, second: Tensor, gradient: Tensor, step: Tensor, correction1: Tensor,
    correction2: Tensor,     lr: Tensor, decay: Tensor, eps: Tensor, beta1: Tensor, beta2: Tensor, seed: Tensor,
) -> list[Tensor]:  # fmt: skip
    """Return weights and both moments of a chunk after an update, each rounded to the dtype that it has."""
    w, m, v, g = (it.float() for it in (weights, first, second, gradient))
    m, v = m + (g - m) * (1 - beta1), v * beta2 + (1 - beta2) * g * g
    root = v.sqrt() / correction2.sqrt() + eps
    w = w * (1 - lr * decay) - lr / correction1 * m / root
    noise = _noise(len(w), step, seed)
    return [
        round_stochastically(value, noise) if kept.dtype == torch.bfloat16 else value
        for kept, value in ((weights, w), (first, m), (second, v))
    ]


def _noise(size: int, step: Tensor, seed: Tensor) -> Tensor:
    """Return whole numbers from 0 to 2¹⁶ − 1, `[size]`: a hash of the position, the step and the seed.

    Each of two rounds is the finalizer of MurmurHash3 (Appleby 2011, public domain) in int32. The hash needs no
    state, so the count of steps may stay on the device.
    """
    x = torch.arange(size, dtype=torch.int32, device=step.device)
    for salt in (seed, step * 40503):
        x = x + salt.to(torch.int32)
        x = (x ^ (x >> 16 & 0xFFFF)) * -2048144789
        x = (x ^ (x >> 13 & 0x7FFFF)) * -1028477387
        x = x ^ (x >> 16 & 0xFFFF)
    return x & 0xFFFF


def round_stochastically(values: Tensor, noise: Tensor) -> Tensor:
    """Return fp32 numbers in bf16, each rounded to a neighbor with the value itself as the mean.

    bf16 is the upper half of fp32: a random number is added to the lower half, which is cut off.

    Args:
        noise: whole numbers from 0 to 2¹⁶ − 1, with the shape of the values.
    """
    return (
        (noise + values.view(torch.int32)).bitwise_and_(-(1 << 16)).view(torch.float32).bfloat16()
    )
