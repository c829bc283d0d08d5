"""Adapters of linear layers (LoRA): W becomes W + scale · B·A, and W is frozen. Code for one device.

B begins at 0, so that the first step is the base model's. Hu et al. 2021, arXiv:2106.09685, section 4.1.

Shapes: W `[out, in]`, A `[rank, in]`, B `[out, rank]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nanoscale.config import model_math
from nanoscale.config.schema import Lora
from nanoscale.models.transformer import Transformer


class Adapter(nn.Module):
    """A low-rank adapter, `[…, in]` to `[…, out]`; its output is added to a layer's result."""

    def __init__(self, layer: nn.Linear, settings: Lora) -> None:
        super().__init__()
        dtype, device, rank = layer.weight.dtype, layer.weight.device, settings.rank
        self.a = nn.Parameter(torch.empty(rank, layer.in_features, dtype=dtype, device=device))
        self.b = nn.Parameter(torch.empty(layer.out_features, rank, dtype=dtype, device=device))
        self.scale = settings.scale

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.a) * self.scale, self.b)


def attach(model: Transformer, settings: Lora) -> None:
    """Freeze a stage and give its layers adapters without values, in place; names of parameters stay."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for layer in adapted_layers(model, settings):
        layer.adapter = Adapter(layer, settings)
        layer.forward = partial(_forward, layer, layer.forward)  # type: ignore[method-assign]


def adapted_layers(model: Transformer, settings: Lora) -> Iterator[nn.Linear]:
    """Yield the layers that have adapters, or will have them."""
    for block in model.layers.values():
        for name in model_math.adapted_layers(model.shape, settings).values():
            layer = block.get_submodule(name)
            assert isinstance(layer, nn.Linear)
            yield layer


def _forward(layer: nn.Linear, frozen: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    adapter = layer.adapter
    assert isinstance(adapter, Adapter)
    delta: Tensor = adapter(x)
    return frozen(x) + delta
