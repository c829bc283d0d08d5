"""AdamW on the local shards of parameters, with moments and weights of any dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer
from torch.optim.adamw import adamw

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
    the parameter, the shard's position and the step alone: replicas stay equal, and a resume continues bit for
    bit.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        """Create it for groups that have the `names` of their parameters."""
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    def initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of a parameter before its first update."""
        moments = {
            name: torch.zeros_like(parameter, dtype=torch.bfloat16)
            for name in ("exp_avg", "exp_avg_sq")
        }
        return {"step": torch.tensor(0.0), **moments}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for name, parameter in zip(group["names"], group["params"], strict=True):
                state = self.state[parameter]
                if not state:
                    state.update(self.initial_state(parameter))
                state["step"] += 1
                random = torch.Generator(parameter.device)
                random.manual_seed(_seed(name, parameter, int(state["step"])))
                tensors = (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
                size = ROUNDED_AT_ONCE[parameter.device.type]
                chunks = [local_tensor(it).view(-1).split(size) for it in tensors]
                for chunk in zip(*chunks, strict=True):
                    _update(chunk, group, float(state["step"]), random)


def _seed(name: str, parameter: Tensor, step: int) -> int:
    start = local_region(parameter)[0] if isinstance(parameter, DTensor) else ()
    return parameter_seed(step, f"{name}:{start}")


def _update(
    kept: Sequence[Tensor], group: dict[str, Any], step: float, random: torch.Generator
) -> None:
    """Update weights and both moments of a chunk, given weights, gradient and moments, `[elements]` each."""
    weights, gradient, first, second = (it.float() for it in kept)
    options = {name: group[name] for name in ("lr", "weight_decay", "eps")}
    options |= {"fused": True, "amsgrad": False, "maximize": False}
    options |= dict(zip(("beta1", "beta2"), group["betas"], strict=True))
    before = torch.full((), step - 1, device=weights.device)  # the update counts it up
    tensors: Any = ([weights], [gradient], [first], [second], [], [before])
    adamw(*tensors, **options)
    noise = torch.empty_like(weights, dtype=torch.int32).random_(0, 1 << 16, generator=random)
    for target, value in zip((kept[0], *kept[2:]), (weights, first, second), strict=True):
        if target is not value:
            target.copy_(round_stochastically(value, noise))


def round_stochastically(values: Tensor, noise: Tensor) -> Tensor:
    """Return fp32 numbers in bf16, each rounded to a neighbor with the value itself as the mean.

    bf16 is the upper half of fp32: a random number is added to the lower half, which is cut off.

    Args:
        noise: whole numbers from 0 to 2¹⁶ − 1, with the shape of the values.
    """
    return (
        (noise + values.view(torch.int32)).bitwise_and_(-(1 << 16)).view(torch.float32).bfloat16()
    )
