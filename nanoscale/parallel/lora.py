"""Adapters of layers that tensor parallelism has divided.

Of a layer divided by column every rank has all of A and its rows of B; of one divided by row its columns of A
and all of B. Then what an adapter adds is divided as the layer's own result is; no more is communicated.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from nanoscale.config.schema import Lora
from nanoscale.models.lora import Adapter, adapted, attach
from nanoscale.models.transformer import Transformer


def apply(model: Transformer, settings: Lora, mesh: DeviceMesh | None) -> None:
    """Give a stage on the meta device its adapters, after `tensor.apply`, in place."""
    attach(model, settings)
    if mesh is None:
        return
    for layer in adapted(model, settings):
        weight, adapter = layer.weight, layer.adapter
        assert isinstance(weight, DTensor) and isinstance(adapter, Adapter)
        columns = weight.placements[0] == Shard(0)
        _distribute(adapter, "a", mesh, Replicate() if columns else Shard(1))
        _distribute(adapter, "b", mesh, Shard(0) if columns else Replicate())
        run = _add_columns if columns else _add_parts
        adapter.forward = partial(run, adapter, mesh)  # type: ignore[method-assign]


def _add_columns(adapter: Adapter, mesh: DeviceMesh, x: DTensor) -> DTensor:
    """From whole inputs to a rank's columns of the result."""
    whole = x.to_local(grad_placements=[Partial()])
    a = _dtensor(adapter.a).to_local(grad_placements=[Partial()])
    found = adapter.apply_matrices(whole, a, _dtensor(adapter.b).to_local())
    return DTensor.from_local(found, mesh, [Shard(x.ndim - 1)], run_check=False)


def _add_parts(adapter: Adapter, mesh: DeviceMesh, x: DTensor) -> DTensor:
    """From a rank's columns of the inputs to its summand of the result."""
    b = _dtensor(adapter.b).to_local(grad_placements=[Partial()])
    found = adapter.apply_matrices(x.to_local(), _dtensor(adapter.a).to_local(), b)
    return DTensor.from_local(found, mesh, [Partial()], run_check=False)


def _dtensor(parameter: Tensor) -> DTensor:
    assert isinstance(parameter, DTensor)
    return parameter


def _distribute(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    whole = distribute_tensor(module.get_parameter(name), mesh, [placement])
    module.register_parameter(name, nn.Parameter(whole))
