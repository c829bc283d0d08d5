"""Schedule-free AdamW, and averages of weights that are evaluated and exported in place of the weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nanoscale.backends import one_pass
from nanoscale.backends.gradients import local_tensor
from nanoscale.config.optimizers import AVERAGE


class ScheduleFreeAdamW(Optimizer):
    """AdamW whose gradients are taken between its weights z and their average x, which is the result.

    The weights of the training are y = (1 − beta1) · z + beta1 · x, so z need not be stored. Each step counts
    in the average with the square of its learning rate. Source: Defazio et al. 2024 (arXiv:2405.15682),
    algorithm 1 and section 4.
    """

    def __init__(
        self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], float(group["lr"])
            numbers = lr, group["weight_decay"], group["eps"], beta1, beta2
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state.update(self.initial_state(parameter))
                step, weight = state["step"] + 1, state["weight"] + lr**2
                share = lr**2 / weight.clamp(min=1e-300)
                inputs = parameter.grad, 1 - beta2 ** step.double(), share
                targets = parameter, state[AVERAGE], state["exp_avg_sq"]
                one_pass.run(_update, self, targets, inputs, *numbers)
                one_pass.keep(state["step"], step, one_pass.flag(self))
                one_pass.keep(state["weight"], weight, one_pass.flag(self))

    def initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of a parameter before its first update."""
        return {
            "step": torch.zeros((), device=parameter.device),
            "weight": torch.zeros((), dtype=torch.float64, device=parameter.device),
            "exp_avg_sq": torch.zeros_like(parameter),
            AVERAGE: initial_average(parameter),
        }


def _update(
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
    one_pass.keep(has_begun, torch.ones_like(has_begun), one_pass.flag(optimizer))


def _towards(average: Tensor, weights: Tensor, has_begun: Tensor, share: Tensor) -> tuple[Tensor]:
    weights = weights.to(average)
    return (torch.where(has_begun > 0, average + (weights - average) * share, weights),)


def initial_average(parameter: Tensor) -> Tensor:
    """Return a copy of a parameter, in fp32 at least: in bf16 a moving average would stand still."""
    return parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32), copy=True)
