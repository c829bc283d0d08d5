"""The optimizer, its parameter groups, and its state under names that every layout shares."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from nanoscale.config.schema import Optimizer as OptimizerConfig

Moments = dict[str, Tensor]


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) or SGD with momentum."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.name == "sgd":
        return SGD(groups, lr=config.lr, momentum=config.momentum)
    betas = (config.beta1, config.beta2)
    return AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=True)


def fill_state(optimizer: Optimizer) -> None:
    """Give every parameter the state that its first update would begin with, to be loaded into."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if isinstance(optimizer, AdamW):
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            elif group["momentum"]:
                state["momentum_buffer"] = torch.zeros_like(parameter)


def named_state(model: nn.Module, optimizer: Optimizer) -> Moments:
    """The optimizer's tensors as `<parameter>.<moment>`, sharded as the parameters are."""
    return {
        f"{name}.{moment}": value
        for name, parameter in model.named_parameters()
        for moment, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }
