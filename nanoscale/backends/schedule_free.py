"""Schedule-free AdamW, and averages of weights that are evaluated and exported in place of the weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

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
            beta1, beta2 = group["betas"]
            lr = float(group["lr"])
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state.update(self.initial_state(parameter))
                state["step"] += 1
                state["weight"] += lr**2
                share = lr**2 / max(float(state["weight"]), 1e-300)
                y, gradient, x, square = map(
                    local_tensor, (parameter, parameter.grad, state[AVERAGE], state["exp_avg_sq"])
                )
                square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                root = (square / (1 - beta2 ** float(state["step"]))).sqrt_().add_(group["eps"])
                update = gradient / root + group["weight_decay"] * y
                z = x.lerp(y, 1 / (1 - beta1)).sub_(update, alpha=lr)
                x.lerp_(z, share)
                y.copy_(z.lerp_(x, beta1))

    def initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of a parameter before its first update."""
        return {
            "step": torch.tensor(0.0),
            "weight": torch.tensor(0.0, dtype=torch.float64),
            "exp_avg_sq": torch.zeros_like(parameter),
            AVERAGE: initial_average(parameter),
        }


@torch.no_grad()
def update_averages(optimizer: Optimizer, decay: float) -> None:
    """Move the moving average of every parameter towards its weights; it begins as the first step's weights."""
    for parameter, state in optimizer.state.items():
        if AVERAGE not in state:
            state[AVERAGE] = initial_average(parameter)
        average = local_tensor(state[AVERAGE])
        average.lerp_(local_tensor(parameter).to(average.dtype), 1 - decay)


def initial_average(parameter: Tensor) -> Tensor:
    """Return a copy of a parameter, in fp32 at least: in bf16 a moving average would stand still."""
    return parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32), copy=True)
