"""A model over several devices of this machine in one process: each has consecutive blocks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from nanoscale.models.transformer import Transformer


def materialize(model: Transformer, devices: Sequence[torch.device]) -> None:
    """Allocate a model on the meta device over the devices, about equally, with uninitialized parameters.

    The first device has the embedding, and the last one the head, if that has weights of its own. Every part
    moves what it gets to its device.
    """
    if len(devices) == 1:
        model.materialize(devices[0])
        return
    layers = list(model.layers.values())
    sizes = [_size(layer) for layer in layers]
    before, total = _size(model) - sum(sizes), _size(model)
    before = before // 2 if model.has_separate_head else before
    middles = [end - size / 2 for end, size in zip(accumulate(sizes), sizes, strict=True)]
    for layer, middle in zip(layers, middles, strict=True):
        _place(layer, devices[int((before + middle) / total * len(devices))])
    last = devices[-1] if model.has_separate_head else devices[0]
    for name, module in model.named_children():
        if name != "layers":
            _place(module, last if name in ("norm", "head") else devices[0])
    model.reset_buffers(devices[0])


def _place(module: nn.Module, device: torch.device) -> None:
    module.to_empty(device=device)
    module.register_forward_pre_hook(partial(_moved, device), with_kwargs=True)


def _moved(device: torch.device, _: nn.Module, *arguments: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), arguments)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
