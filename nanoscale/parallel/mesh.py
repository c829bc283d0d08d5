"""The ranks arranged in the axes of the layout: tp varies fastest, then cp, then dp, then pp."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from nanoscale.config.layout import Coordinates, coordinates
from nanoscale.config.schema import Config


@dataclass(frozen=True)
class Layout:
    """Where this rank stands, and whom it works with on each axis; None on an axis of one."""

    place: Coordinates
    data: DeviceMesh | None
    """what parameters and gradients are spread over: `[dp_replicate, dp_shard · cp]`, or the last alone.
    Ranks of cp hold the same parameters for other tokens, as ranks of dp do. None in a single process only."""
    tensor: DeviceMesh | None
    context: ProcessGroup | None
    pipeline: ProcessGroup | None


def lay_out(config: Config, device_type: str) -> Layout:
    """Arrange all ranks. Every rank calls it once, after it has joined the others."""
    if not dist.is_initialized():
        return Layout(Coordinates(0, 0, 0, 0), None, None, None, None)
    parallel = config.parallel
    assert isinstance(parallel.dp, int), "the launcher freezes a number"
    copies = parallel.dp_replicate if config.zero.stage else parallel.dp * parallel.cp
    mesh = _mesh(
        device_type,
        pp=parallel.pp,
        dp_replicate=copies,
        dp_shard=parallel.dp * parallel.cp // copies,
        tp=parallel.tp,
    )
    spread = mesh["dp_replicate", "dp_shard"] if copies > 1 else mesh["dp_shard"]
    return Layout(
        place=coordinates(dist.get_rank(), parallel),
        data=spread,
        tensor=mesh["tp"] if parallel.tp > 1 else None,
        context=context_group(config, device_type),
        pipeline=mesh["pp"].get_group() if parallel.pp > 1 else None,
    )


def _mesh(device_type: str, **degrees: int) -> DeviceMesh:
    """A mesh of the axes that have more than one rank, and of dp_shard in any case."""
    kept = {name: size for name, size in degrees.items() if size > 1 or name == "dp_shard"}
    return init_device_mesh(device_type, tuple(kept.values()), mesh_dim_names=tuple(kept))


def context_group(config: Config, device_type: str) -> ProcessGroup | None:
    """The ranks that share a sequence with this one; None without cp. Every rank calls it."""
    parallel = config.parallel
    if parallel.cp == 1:
        return None
    others = dist.get_world_size() // (parallel.cp * parallel.tp)
    mesh = _mesh(device_type, dp_shard=others, cp=parallel.cp, tp=parallel.tp)
    return mesh["cp"].get_group()
