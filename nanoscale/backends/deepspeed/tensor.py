"""Tensor parallelism by DeepSpeed's own layers: matrices of the blocks split by column, then by row.

Embedding, norms and head stay whole on every rank, as in DeepSpeed's AutoTP.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from nanoscale.models.transformer import Transformer

SplitDims = dict[str, int]
"""The dimension along which a parameter is divided, by name; others are whole on every rank."""

_COLUMNS = ("attention.wq", "attention.wk", "attention.wv", "mlp.gate", "mlp.up")
_ROWS = ("attention.wo", "mlp.down")


def apply(model: Transformer, group: ProcessGroup) -> SplitDims:
    """Divide a stage on the meta device over the ranks of `group`, in place."""
    from deepspeed.module_inject import set_autotp_mode
    from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer

    set_autotp_mode(training=True)
    split_dims: SplitDims = {}
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if name.endswith(_COLUMNS):
            _replace(modules, name, LinearLayer(module, group))
            split_dims[f"{name}.weight"] = 0
            if getattr(module, "bias", None) is not None:
                split_dims[f"{name}.bias"] = 0
        if name.endswith(_ROWS):
            _replace(modules, name, LinearAllreduce(module, group))
            split_dims[f"{name}.weight"] = 1
    return split_dims


def _replace(modules: dict[str, nn.Module], name: str, layer: Any) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(modules[parent], leaf, layer)


def materialize(model: Transformer, device: Any) -> None:
    """Allocate memory for a model on the meta device, and keep DeepSpeed's attributes of its parameters."""
    deepspeed_attributes = {
        name: dict(parameter.__dict__) for name, parameter in model.named_parameters()
    }
    model.materialize(device)
    for name, parameter in model.named_parameters():
        parameter.__dict__.update(deepspeed_attributes[name])
