"""Adapters of layers that tensor parallelism has divided.

For a layer divided by column every rank has all of A and its rows of B; for one divided by row its columns of
A and all of B. So an adapter's output is divided like the layer's own result, and no further communication is
needed.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from nanoscale.config.schema import Lora
from nanoscale.models.lora import Adapter, attach
from nanoscale.models.transformer import Transformer
from nanoscale.parallel.local_parameters import divide, partial_grad


def apply(model: Transformer, settings: Lora, mesh: DeviceMesh | None) -> None:
    """Add adapters to a stage on the meta device, after `tensor.apply`, in place."""
    attach(model, settings)
    if mesh is None:
        return
    for block in model.layers.values():
        for layer in block.modules():
            if isinstance(getattr(layer, "adapter", None), Adapter):
                _divide(layer, block, mesh)


def _divide(layer: nn.Module, block: nn.Module, mesh: DeviceMesh) -> None:
    weight, adapter = layer.weight, layer.adapter
    assert isinstance(weight, DTensor) and isinstance(adapter, Adapter)
    columns = weight.placements[0] == Shard(0)
    placements = {
        "a": Replicate() if columns else Shard(1),
        "b": Shard(0) if columns else Replicate(),
    }
    divide(adapter, block, mesh, placements, partial_grad)
