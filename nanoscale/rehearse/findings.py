"""Mistakes of the code that one rank shows, and uneven shards, as sentences."""

from __future__ import annotations

from torch.distributed.tensor import DTensor, Shard

from nanoscale.backends.native import NativeEngine
from nanoscale.checkpoint.sharded import Description

_SHOWN = 3


def of_optimizer(engine: NativeEngine) -> list[str]:
    """Report trained parameters that no optimizer updates."""
    groups = engine._torch_optimizer().param_groups
    updated = {id(parameter) for group in groups for parameter in group["params"]}
    left = [name for name, p in engine.parameters() if id(p) not in updated]
    return [f"no optimizer updates {_shown(left)}"] if left else []


def of_gradients(engine: NativeEngine) -> list[str]:
    """Report parameters that keep their gradients after a step."""
    kept = [name for name, p in engine.parameters() if p.grad is not None]
    return [f"gradients are kept after the step: {_shown(kept)}"] if kept else []


def of_filled(engine: NativeEngine) -> list[str]:
    """Report parameters whose gradients are zeros in place of missing ones."""
    filled = {id(parameter) for parameter in engine.filled}
    names = [name for name, p in engine.parameters() if id(p) in filled]
    return [f"no gradient reaches {_shown(names)}: zeros are taken"] if names else []


def of_growth(after: list[int], where: str = "on the device") -> list[str]:
    """Report memory that grows with the last step. The first step makes the optimizer's states."""
    if len(after) < 2 or after[-1] <= after[-2]:
        return []
    more = after[-1] - after[-2]
    return [f"a step leaves {more:,} bytes more than it found {where}: memory leaks"]


def of_resuming(written: Description, needed: Description) -> list[str]:
    """Report tensors that differ between a checkpoint and what a resumed run needs."""
    other = [name for name in sorted({*written, *needed}) if written.get(name) != needed.get(name)]
    return [f"a checkpoint cannot be resumed from: {_shown(other)}"] if other else []


def of_shards(engine: NativeEngine) -> list[str]:
    """Report parameters whose rows do not divide evenly among the ranks that shard them."""
    uneven = []
    for name, parameter in engine.parameters():
        if isinstance(parameter, DTensor):
            size, mesh = parameter.shape, parameter.device_mesh.shape
            for ranks, placement in zip(mesh, parameter.placements, strict=True):
                if isinstance(placement, Shard) and size[placement.dim] % ranks:
                    uneven.append(f"{name} ({size[placement.dim]} rows over {ranks} ranks)")
    return [f"uneven shards, so some ranks hold more: {_shown(uneven)}"] if uneven else []


def _shown(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
