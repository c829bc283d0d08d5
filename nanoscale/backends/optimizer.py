"""The optimizer, its parameter groups, and its state under names and dtypes that every layout shares."""

import math
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from nanoscale.backends import one_pass
from nanoscale.backends.adafactor import Adafactor
from nanoscale.backends.adamw import (
    LocalAdamW,
    Moments,
    OwnOptimizer,
    ParamGroups,
    RoundedAdamW,
    ScheduleFreeAdamW,
    initial_average,
)
from nanoscale.backends.gradients import local_tensor
from nanoscale.backends.muon import Muon
from nanoscale.checkpoint.flat import Box, FlatShard
from nanoscale.common.errors import UserError
from nanoscale.config.optimizers import AVERAGE, group_of, rule_of
from nanoscale.config.schema import Optimizer as OptimizerConfig
from nanoscale.models.initialization import local_region
from nanoscale.models.torchao_log import silence_torchao

NamedParameters = list[tuple[str, nn.Parameter]]
"""The parameters that a rank holds, in all its parts of the model, with their names in the whole model."""


def make_optimizer(
    parameters: NamedParameters,
    config: OptimizerConfig,
    *,
    rounded: bool = False,
    build: Callable[[ParamGroups], Optimizer] | None = None,
) -> Optimizer:
    """Create the optimizer that the configuration names, in groups of parameters with equal values.

    Matrices are decayed and other parameters are not, unless `optimizer.groups` says otherwise.

    Args:
        rounded: moments, or weights too, are kept in bf16 and rounded stochastically.
        build: the user's own optimizer; None: from the configuration's name.
    """
    groups: dict[tuple[bool, bool, float, float], list[nn.Parameter]] = {}
    for name, parameter in parameters:
        is_matrix = _dimensions(name, parameter) > 1
        in_block = any(part.isdecimal() for part in name.split("."))
        is_muon = config.name == "muon" and in_block and _dimensions(name, parameter) in (2, 3)
        chosen = group_of(name, config)
        decay, factor = config.weight_decay if is_matrix else 0.0, 1.0
        if chosen is not None:
            factor = chosen.lr_factor
            decay = decay if chosen.weight_decay is None else chosen.weight_decay
        groups.setdefault((is_muon, not is_matrix, factor, decay), []).append(parameter)
    own: ParamGroups = [
        {"params": groups[key], "weight_decay": key[3], "lr_factor": key[2]}
        | ({"is_muon": key[0]} if config.name == "muon" else {})
        for key in sorted(groups)
    ]
    keys = rule_of(config).keys
    arguments: dict[str, Any] = {
        key: getattr(config, key) for key in ("eps", "momentum") if key in keys
    }
    if "beta2" in keys:
        arguments["betas"] = (config.beta1, config.beta2)
    if build is None and not rounded:
        return BUILDERS[config.name](own, lr=config.lr, **arguments)
    names = {parameter: name for name, parameter in parameters}
    for group in own:
        group["names"] = [names[parameter] for parameter in group["params"]]
    if build is not None:
        optimizer = build([{**group, "lr": config.lr} for group in own])
        for group in optimizer.param_groups:
            group["initial"] = _numbers(group)  # values before the first update
        _check_own(optimizer, parameters)
        return optimizer
    return RoundedAdamW(own, lr=config.lr, **arguments)


def _check_own(optimizer: Optimizer, parameters: NamedParameters) -> None:
    """Try the user's optimizer with gradients of zero; all that it keeps must be tensors that layouts exchange.

    Raises:
        UserError: a state is of another type or shape.
    """
    fill_own_state(optimizer)
    for name, parameter in parameters:
        for key, value in optimizer.state.get(parameter, {}).items():
            like = value is None or (
                isinstance(value, Tensor)
                and (
                    value.ndim == 0
                    or (value.shape == parameter.shape and type(value) is type(parameter.data))
                )
            )
            if not like:
                what = f"keeps {key} of {name} as {type(value).__name__}"
                why = "a checkpoint has scalar tensors, and tensors made like the parameter"
                raise UserError("hooks", f"optimizer() of hooks.path {what}: {why}")
    optimizer.state.clear()


@torch.no_grad()
def fill_own_state(optimizer: Optimizer) -> None:
    """Give the parameters of the user's optimizer the states of an update with a rate and gradients of zero.

    Raises a UserError if it also changes what no checkpoint has.
    """
    groups = optimizer.param_groups
    parameters = [parameter for group in groups for parameter in group["params"]]
    if all(optimizer.state.get(parameter) for parameter in parameters):
        return
    kept = [(parameter, parameter.grad, parameter.detach().clone()) for parameter in parameters]
    values = [
        {key: deepcopy(value) for key, value in group.items() if key != "params"}
        for group in groups
    ]
    own = _numbers(vars(optimizer))
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    set_lr(optimizer, 0.0)
    optimizer.step()
    for parameter, gradient, weights in kept:
        local_tensor(parameter).copy_(local_tensor(weights))
        parameter.grad = gradient
    lost = [key for key, value in _numbers(vars(optimizer)).items() if value != own.get(key)]
    for group, first in zip(groups, values, strict=True):
        others = group.keys() - {*group.get("initial", ()), "params", "lr"}
        lost += [key for key in others if repr(group[key]) != repr(first.get(key))]
        group.update(first)
    if lost:
        why = "a checkpoint has only states of parameters, and numbers with which groups begin"
        raise UserError("hooks", f"optimizer() of hooks.path changes {lost[0]}: {why}")


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    """Return the numbers among values, except the ones that nanoscale sets."""
    return {
        key: float(value)
        for key, value in values.items()
        if type(value) in (int, float) or (isinstance(value, Tensor) and value.ndim == 0)
        if key not in ("lr", "lr_factor", "weight_decay")
    }


def _make_adamw(groups: ParamGroups, **arguments: Any) -> Optimizer:
    """Create AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101)."""
    is_sharded = any(isinstance(p, DTensor) for group in groups for p in group["params"])
    return (LocalAdamW if is_sharded else AdamW)(groups, **arguments, fused=True)


def _update_group(
    optimizer: OwnOptimizer, group: dict[str, Any], update: one_pass.Update, *numbers: float
) -> None:
    """Update the parameters of a group and their moments, but not the averages of weights."""
    for parameter in (p for p in group["params"] if p.grad is not None):
        state = optimizer.filled(parameter).items()
        moments = (value for name, value in state if name != AVERAGE)
        rates = group["lr"], group["weight_decay"]
        one_pass.run(update, optimizer, [parameter, *moments], [parameter.grad], *rates, *numbers)


class Lion(OwnOptimizer):
    """Lion (Chen et al. 2023, arXiv:2302.06675, algorithm 2): the sign of a moving average is the update."""

    def initial_state(self, parameter: Tensor) -> Moments:
        """Return the state of a parameter before its first update."""
        return {"exp_avg": torch.zeros_like(parameter)}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            _update_group(self, group, _lion, *group["betas"])


def _lion(
    weights: Tensor,
    average: Tensor,
    gradient: Tensor,
    lr: Tensor,
    decay: Tensor,
    beta1: Tensor,
    beta2: Tensor,
) -> tuple[Tensor, ...]:
    sign = (average + (gradient - average) * (1 - beta1)).sign()
    return weights * (1 - lr * decay) - lr * sign, average + (gradient - average) * (1 - beta2)


class SGD(OwnOptimizer):
    """Gradient descent, with heavy-ball momentum unless it is 0; decay is a part of the gradient."""

    def initial_state(self, parameter: Tensor) -> Moments:
        """Return the state of a parameter before its first update."""
        with_momentum = self.param_groups[0]["momentum"] != 0
        return {"momentum_buffer": torch.zeros_like(parameter)} if with_momentum else {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            _update_group(self, group, _sgd, group["momentum"])


def _sgd(weights: Tensor, *others: Tensor) -> list[Tensor]:
    *buffers, gradient, lr, decay, momentum = others
    gradient = gradient + decay * weights
    moved = [momentum * buffer + gradient for buffer in buffers]
    return [weights - lr * (moved[0] if moved else gradient), *moved]


def _dimensions(name: str, parameter: nn.Parameter) -> int:
    """Return the dimensions of the whole parameter, or of one expert's bias.

    A parameter sharded by DeepSpeed is empty and keeps its shape.
    """
    return len(getattr(parameter, "ds_shape", parameter.shape)) - name.endswith("_bias")


def _make_adamw8bit(groups: ParamGroups, **arguments: Any) -> Optimizer:
    """Create AdamW with moments in blocks of 256 8-bit codes and a scale (Dettmers et al. 2022,
    arXiv:2110.02861).

    Tensors of fewer than 4096 elements on a rank, or not of whole blocks, keep 32-bit moments. The update is
    computed in fp32, whatever the parameters' dtype.
    """
    silence_torchao()
    from torchao.optim import AdamW8bit

    optimizer: Optimizer = AdamW8bit(groups, **arguments)
    if groups[0]["params"][0].device.type == "cpu":
        # Compiling the update takes half a minute on a CPU and a C++ compiler, and gains nothing.
        eager: Any = torch.compiler.set_stance("force_eager")
        optimizer.step = eager(optimizer.step)  # type: ignore[method-assign]
    return optimizer


BUILDERS: dict[str, Callable[..., Optimizer]] = {
    "adamw": _make_adamw,
    "adamw8bit": _make_adamw8bit,
    "adafactor": Adafactor,
    "lion": Lion,
    "muon": Muon,
    "schedule-free": ScheduleFreeAdamW,
    "sgd": SGD,
}
"""Builders by the value of `optimizer.name`; `nanoscale.config.optimizers.OPTIMIZERS` describes each."""


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate, which groups may multiply."""
    for group in optimizer.param_groups:
        own = lr * group.get("lr_factor", 1.0)
        if isinstance(group["lr"], Tensor):  # a number would be compiled into each update
            group["lr"].fill_(own)
        else:
            group["lr"] = own


def skips_on_device(optimizer: Optimizer) -> bool:
    """True if the update reads `found_inf`; torchao's and the user's do not."""
    return isinstance(optimizer, AdamW | OwnOptimizer)


def clip_in_update(optimizer: Optimizer, norm: Tensor, limit: float) -> bool:
    """Let the next update divide the gradients so that their norm is `limit` at most; False if it cannot.

    The fused update of AdamW reads the gradients anyway, and writes them back divided: that is 4 bytes a
    parameter less than a pass of its own. Its divisor is fp32, which would be too coarse for fp64.
    """
    if type(optimizer) not in (AdamW, LocalAdamW) or norm.dtype != torch.float32:
        return False
    fused: Any = optimizer
    fused.grad_scale = ((norm + 1e-6) / limit).clamp(min=1.0)
    return True


def fill_state(optimizer: Optimizer, *, averages: bool = False) -> None:
    """Give every parameter that has no state the one of its first update, with `averages` an average too."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not (state := optimizer.state[parameter]):
                state.update(initial_state(optimizer, parameter))
                if averages:
                    state[AVERAGE] = initial_average(parameter)


def initial_state(optimizer: Optimizer, parameter: Tensor) -> Moments:
    """Return the state of a parameter before its first update."""
    if isinstance(optimizer, OwnOptimizer):
        return optimizer.initial_state(parameter)
    if isinstance(optimizer, Muon) and any(parameter is p for p in optimizer.matrices()):
        return {"momentum_buffer": torch.zeros_like(parameter)}
    if isinstance(optimizer, AdamW):
        return {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    if not hasattr(optimizer, "_new_buffer"):
        raise TypeError(f"no state is known for {type(optimizer).__name__}")
    adamw8bit: Any = optimizer
    return {
        "step": torch.tensor(0.0),
        "exp_avg": adamw8bit._new_buffer(parameter, signed=True),
        "exp_avg_sq": adamw8bit._new_buffer(parameter, signed=False),
    }


def named_state(
    parameters: NamedParameters, optimizer: Optimizer, *, to_load: bool = False
) -> Moments:
    """Return the optimizer's tensors as `<parameter>.<moment>`, sharded like the parameters.

    8-bit moments are returned in fp32, which any layout can divide and quantize for itself. They are never all
    in memory: each is computed when it is written.

    Args:
        to_load: return 8-bit moments as empty fp32 buffers in host memory. After they have been loaded,
            `load_state` must be called.
    """
    convert = _buffer_to_load if to_load else _moment_to_save
    moments = {
        name: convert(value) if is_quantized(value) else value
        for name, value in _named_tensors(parameters, optimizer)
    }
    for name, group, key, initial in _group_values(parameters, optimizer):
        # A value that no update has changed is a setting, which a resumed run may have changed: infinity.
        value = float(group[key])
        moments[name] = torch.tensor(math.inf if value == initial else value, dtype=torch.float64)
    return moments


@torch.no_grad()
def load_state(parameters: NamedParameters, optimizer: Optimizer, moments: Moments) -> None:
    """Quantize the fp32 buffers of `named_state` after loading, and set the values of groups."""
    for name, value in _named_tensors(parameters, optimizer):
        if is_quantized(value):
            loaded: Any = moments[name]
            local = local_tensor(value)
            local.copy_(loaded.local.to(local.device).view(local.shape))
    for name, group, key, _ in _group_values(parameters, optimizer):
        if math.isfinite(stored := float(moments[name])):
            value = group[key]
            group[key] = value.fill_(stored) if isinstance(value, Tensor) else type(value)(stored)


def _group_values(
    parameters: NamedParameters, optimizer: Optimizer
) -> Iterator[tuple[str, dict[str, Any], str, float]]:
    """Yield the numbers in groups, as a moment of each parameter: its name, group, key, and first value."""
    names = {parameter: name for name, parameter in parameters}
    for group in optimizer.param_groups:
        for key, initial in group.get("initial", {}).items():
            for parameter in group["params"]:
                yield f"{names[parameter]}.group_{key}", group, key, initial


def _moment_to_save(moment: Tensor) -> FlatShard:
    quantized: Any = local_tensor(moment)
    tensors = [tensor.detach() for tensor in (quantized.codes, quantized.scale, quantized.qmap)]
    restore = partial(dequantize, signed=quantized.signed)
    return FlatShard(tensors, moment.shape, 0, _window(moment), restore, torch.float32)


def _buffer_to_load(moment: Tensor) -> FlatShard:
    buffer = torch.empty(local_tensor(moment).numel(), dtype=torch.float32)
    return FlatShard(buffer, tuple(moment.shape), 0, _window(moment))


def _window(moment: Tensor) -> Box:
    """Return the box of a moment that this rank has."""
    return (
        Box(*local_region(moment))
        if isinstance(moment, DTensor)
        else Box.whole(tuple(moment.shape))
    )


def _named_tensors(parameters: NamedParameters, optimizer: Optimizer) -> list[tuple[str, Tensor]]:
    return [
        (f"{name}.{moment}", value)
        for name, parameter in parameters
        for moment, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    ]


def is_quantized(moment: Tensor) -> bool:
    return hasattr(local_tensor(moment), "codes")


def plain_tensors(local: Any) -> list[Tensor]:
    """Return the tensors that a local parameter or moment consists of: codes and scales of 8 or 4 bits."""
    if not hasattr(local, "__tensor_flatten__"):
        return [local]
    return [getattr(local, name) for name in local.__tensor_flatten__()[0]]


def dequantize(codes: Tensor, scale: Tensor, levels: Tensor, *, signed: bool) -> Tensor:
    """Return an 8-bit moment in fp32, `[elements]`, which gives the same bits when it is quantized again.

    A block is divided by its largest magnitude, which becomes 1 or −1. The 256 levels contain no −1: it is
    rounded to the lowest, −0.993, from which that magnitude could not be restored. So the lowest level is read
    as −1.
    """
    from torchao.optim.subclass_8bit import OptimState8bit

    if signed:
        levels = levels.clone()
        levels[0] = -1.0
    quantized: Any = OptimState8bit(codes, scale, levels, signed, dtype=torch.float32)
    return quantized.dequantize().view(-1)
