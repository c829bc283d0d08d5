"""AdamW on the local shards of parameters, with moments and weights of any dtype, and schedule-free.

Averages of weights are evaluated and exported in place of the weights.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from nanoscale.backends import one_pass
from nanoscale.backends.gradients import local_tensor
from nanoscale.config.optimizers import AVERAGE
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


ParamGroups = list[dict[str, Any]]
Moments = dict[str, Tensor]
"""The tensors that an optimizer keeps for one parameter, by name."""


class OwnOptimizer(Optimizer):
    """An optimizer with an update of our own; a group without a setting has the optimizer's."""

    def __init__(self, groups: ParamGroups, **settings: Any) -> None:
        super().__init__(groups, {"weight_decay": 0.0, **settings})

    def initial_state(self, parameter: Tensor) -> Moments:
        """Return the state of a parameter before its first update."""
        raise NotImplementedError

    def filled(self, parameter: Tensor) -> Moments:
        """Return the state of a parameter, before its first update the initial one."""
        state: Moments = self.state[parameter]
        if not state:
            state.update(self.initial_state(parameter))
        return state


class RoundedAdamW(OwnOptimizer):
    """AdamW that computes in fp32 and rounds what is kept in bf16, moments or weights, stochastically.

    Rounded to the nearest number, a weight whose updates are below 1/512 of it would never change, and a
    second moment with `beta2` above 0.998 neither. At random, a number becomes one of its two neighbors, with
    its own value as the mean (Gupta et al. 2015, arXiv:1502.02551). The random numbers depend on the name of
    the parameter, the shard's position, the element and the step alone: replicas stay equal, and a resume
    continues bit for bit. Its groups have the `names` of their parameters.
    """

    def initial_state(self, parameter: Tensor) -> Moments:
        """Return the state of a parameter before its first update."""
        moments = {
            name: torch.zeros_like(parameter, dtype=torch.bfloat16)
            for name in ("exp_avg", "exp_avg_sq")
        }
        return {"step": torch.zeros((), device=parameter.device), **moments}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            numbers = group["lr"], group["weight_decay"], group["eps"], *group["betas"]
            steps = [self.filled(parameter)["step"] for parameter in group["params"]]
            counts = (torch.stack(steps).double() + 1).unbind()
            both = (torch._foreach_pow(beta, counts) for beta in group["betas"])
            for name, parameter, *powers in zip(
                group["names"], group["params"], *both, strict=True
            ):
                state = self.state[parameter]
                targets = parameter, state["exp_avg"], state["exp_avg_sq"]
                inputs = parameter.grad, state["step"], *powers
                one_pass.run(
                    _update, self, targets, inputs, *numbers, seed=partial(_seed, name, parameter)
                )
            torch._foreach_add_(steps, 1)
            if (skipped := one_pass.flag(self)) is not None:
                torch._foreach_sub_(steps, [skipped] * len(steps))


def _seed(name: str, parameter: Tensor, chunk: int) -> int:
    start = local_region(parameter)[0] if isinstance(parameter, DTensor) else ()
    return parameter_seed(chunk, f"{name}:{start}") & 0x7FFFFFFF


def _update(
    weights: Tensor, first: Tensor, second: Tensor, gradient: Tensor, step: Tensor, power1: Tensor,
    power2: Tensor, lr: Tensor, decay: Tensor, eps: Tensor, beta1: Tensor, beta2: Tensor, seed: Tensor,
) -> list[Tensor]:  # fmt: skip
    """Return weights and both moments of a chunk after an update, each rounded to the dtype that it has."""
    w, m, v, g = (it.float() for it in (weights, first, second, gradient))
    m, v = m + (g - m) * (1 - beta1), v * beta2 + (1 - beta2) * g * g
    correction1, correction2 = ((1 - power).float() for power in (power1, power2))
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


class ScheduleFreeAdamW(OwnOptimizer):
    """AdamW whose gradients are taken between its weights z and their average x, which is the result.

    The weights of the training are y = (1 − beta1) · z + beta1 · x, so z need not be stored. Each step counts
    in the average with the square of its learning rate. Source: Defazio et al. 2024 (arXiv:2405.15682),
    algorithm 1 and section 4.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], float(group["lr"])
            numbers = lr, group["weight_decay"], group["eps"], beta1, beta2
            for parameter in group["params"]:
                state = self.filled(parameter)
                step, weight = state["step"] + 1, state["weight"] + lr**2
                share = lr**2 / weight.clamp(min=1e-300)
                inputs = parameter.grad, 1 - beta2 ** step.double(), share
                targets = parameter, state[AVERAGE], state["exp_avg_sq"]
                one_pass.run(_update_free, self, targets, inputs, *numbers)
                one_pass.keep(self, state["step"], step)
                one_pass.keep(self, state["weight"], weight)

    def initial_state(self, parameter: Tensor) -> Moments:
        """Return the state of a parameter before its first update."""
        return {
            "step": torch.zeros((), device=parameter.device),
            "weight": torch.zeros((), dtype=torch.float64, device=parameter.device),
            "exp_avg_sq": torch.zeros_like(parameter),
            AVERAGE: initial_average(parameter),
        }


def _update_free(
    y: Tensor, x: Tensor, square: Tensor, gradient: Tensor, correction: Tensor, share: Tensor,
    lr: Tensor, decay: Tensor, eps: Tensor, beta1: Tensor, beta2: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    square = square * beta2 + (1 - beta2) * gradient * gradient
    root = (square / correction.to(square)).sqrt() + eps
    z = x + (y - x) / (1 - beta1) - lr * (gradient / root + decay * y)
    x = x + (z - x) * share.to(x)
    return z + (x - z) * beta1, x, square


@torch.no_grad()
def update_averages(optimizer: Optimizer, decay: float) -> None:
    """Move the moving average of every parameter towards its weights; it begins as the weights after the first
    step that is not skipped."""
    if not optimizer.state:
        return
    first = next(iter(optimizer.state))
    has_begun: Tensor | None = getattr(optimizer, "average_has_begun", None)
    if has_begun is None:  # 1 after a checkpoint with averages
        has_begun = torch.zeros(1, device=local_tensor(first).device)
        vars(optimizer)["average_has_begun"] = has_begun
    for parameter, state in optimizer.state.items():
        if AVERAGE not in state:
            state[AVERAGE] = initial_average(parameter)
        one_pass.run(_towards, optimizer, [state[AVERAGE]], [parameter, has_begun], 1 - decay)
    one_pass.keep(optimizer, has_begun, torch.ones_like(has_begun))


def _towards(average: Tensor, weights: Tensor, has_begun: Tensor, share: Tensor) -> tuple[Tensor]:
    weights = weights.to(average)
    return (torch.where(has_begun > 0, average + (weights - average) * share, weights),)


def initial_average(parameter: Tensor) -> Tensor:
    """Return a copy of a parameter, in fp32 at least: in bf16 a moving average would stand still."""
    return parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32), copy=True)
