"""The optimizer, its parameter groups, and its state under names and in types that every layout shares."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer

from nanoscale.backends.gradients import own_part
from nanoscale.config.schema import Optimizer as OptimizerConfig

Named = list[tuple[str, nn.Parameter]]
"""the parameters that a rank holds, in all its parts of the model, with their names in the whole of it"""
Moments = dict[str, Tensor]


def make_optimizer(parameters: Named, config: OptimizerConfig) -> Optimizer:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101), also in 8 bits, or SGD with momentum."""
    matrices = [p for _, p in parameters if _dimensions(p) > 1]
    vectors = [p for _, p in parameters if _dimensions(p) <= 1]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.name == "sgd":
        return SGD(groups, lr=config.lr, momentum=config.momentum)
    adam: dict[str, Any] = {
        "lr": config.lr,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
    }
    if config.name == "adamw8bit":
        return _make_adamw8bit(groups, adam)
    divided = any(isinstance(parameter, DTensor) for _, parameter in parameters)
    return (LocalAdamW if divided else AdamW)(groups, **adam, fused=True)


class LocalAdamW(AdamW):
    """AdamW of what a rank has of every parameter, which is all that an update of single numbers needs.

    Updated as DTensors, 288 parameters took 11 to 14 ms of the host's time a step, and 0.7 to 0.9 s in the
    first one, in which PyTorch finds out for each how it is divided; so they take 5 ms, and 23.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        """What the update takes, put into the lists by PyTorch; from then on plain tensors."""
        complex_ones: bool = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = [own_part(tensor) for tensor in tensors]
        return complex_ones


def _dimensions(parameter: nn.Parameter) -> int:
    """Of the whole parameter; one that DeepSpeed has taken apart is empty and remembers its shape."""
    return len(getattr(parameter, "ds_shape", parameter.shape))


def _make_adamw8bit(groups: list[dict[str, Any]], adam: dict[str, Any]) -> Optimizer:
    """AdamW with moments in blocks of 256 8-bit codes and a scale (Dettmers et al. 2022, arXiv:2110.02861).

    Tensors of fewer than 4096 elements on a rank, or not of whole blocks, keep 32-bit moments. The update is
    computed in fp32, whatever the parameters' type.
    """
    from torchao.optim import AdamW8bit

    optimizer: Optimizer = AdamW8bit(groups, **adam)
    if groups[0]["params"][0].device.type == "cpu":
        # Compiling the update takes half a minute there and a C++ compiler, and gains nothing.
        eager: Any = torch.compiler.set_stance("force_eager")
        optimizer.step = eager(optimizer.step)  # type: ignore[method-assign]
    return optimizer


def set_lr(optimizer: Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(
            group["lr"], Tensor
        ):  # a number would be compiled into the update, again every step
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def fill_state(optimizer: Optimizer) -> None:
    """Give every parameter the state that its first update would begin with, to be loaded into."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter].update(first_state(optimizer, parameter))


def first_state(optimizer: Optimizer, parameter: Tensor) -> Moments:
    if isinstance(optimizer, SGD):
        with_momentum = optimizer.param_groups[0]["momentum"] != 0
        return {"momentum_buffer": torch.zeros_like(parameter)} if with_momentum else {}
    if isinstance(optimizer, AdamW):
        return {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    adamw8bit: Any = optimizer
    return {
        "step": torch.tensor(0.0),
        "exp_avg": adamw8bit._new_buffer(parameter, signed=True),
        "exp_avg_sq": adamw8bit._new_buffer(parameter, signed=False),
    }


def named_state(parameters: Named, optimizer: Optimizer) -> Moments:
    """The optimizer's tensors as `<parameter>.<moment>`, sharded as the parameters are.

    Quantised ones are given as copies in fp32, which any layout can divide and quantise for itself: after
    something has been loaded into them, `load_state` is to be called.
    """
    return {
        name: dequantise(value) if is_quantised(value) else value
        for name, value in _named_tensors(parameters, optimizer)
    }


@torch.no_grad()
def load_state(parameters: Named, optimizer: Optimizer, moments: Moments) -> None:
    """Take over what was loaded into the tensors of `named_state`, where those are copies."""
    for name, value in _named_tensors(parameters, optimizer):
        if is_quantised(value):
            own_part(value).copy_(own_part(moments[name]))


def _named_tensors(parameters: Named, optimizer: Optimizer) -> list[tuple[str, Tensor]]:
    return [
        (f"{name}.{moment}", value)
        for name, parameter in parameters
        for moment, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    ]


def is_quantised(moment: Tensor) -> bool:
    return hasattr(own_part(moment), "codes")


def dequantise(moment: Tensor) -> Tensor:
    """An 8-bit moment in fp32, such that quantising it in the same blocks gives the same bits.

    A block is divided by its largest magnitude, which becomes 1 or −1. Among the 256 levels there is no −1: it
    is rounded to the lowest, −0.993, from which that magnitude could not be told again. So the lowest level
    is read as the −1 that it stands for.
    """
    quantised: Any = own_part(moment)
    levels = quantised.qmap.clone()
    if quantised.signed:
        levels[0] = -1.0
    local = type(quantised)(
        quantised.codes, quantised.scale, levels, quantised.signed, dtype=torch.float32
    ).dequantize()
    if not isinstance(moment, DTensor):
        return local
    mesh, placements = moment.device_mesh, moment.placements
    shape, stride = moment.size(), moment.stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
