"""The ranks arranged in the axes of the layout: tp varies fastest, then cp, then dp, then pp."""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from nanoscale.config.layout import Coordinates, coordinates, tied_ranks
from nanoscale.config.resolved import ResolvedConfig


@dataclass(frozen=True)
class ExpertLayout:
    """The layout of experts. Ranks of ep are neighbors in dp_shard · cp, or in dp_shard · cp · tp, and each has
    other experts."""

    data: DeviceMesh
    """The mesh of data parallelism over the ranks that have the same experts."""
    expert_mesh: DeviceMesh
    """`[ep, tp]` if tp divides the width of experts, or ep alone."""
    group: ProcessGroup
    """The ranks of ep."""


@dataclass(frozen=True)
class Layout:
    """This rank's coordinates, and its groups on each axis; None on an axis of one."""

    coordinates: Coordinates
    data: DeviceMesh | None
    """The mesh over which parameters and gradients are sharded: `[dp_replicate, dp_shard · cp]`, or the last
    alone. Ranks of cp hold the same parameters for other tokens, as ranks of dp do. None only in a single
    process."""
    tensor: DeviceMesh | None
    context: ProcessGroup | None
    pipeline: ProcessGroup | None
    experts: ExpertLayout | None = None
    """The layout of experts with ep."""
    ends: ProcessGroup | None = None
    """The ranks of the first and the last stage with this rank's shard of a tied embedding that they train."""


def make_layout(config: ResolvedConfig, device_type: str) -> Layout:
    """Arrange all ranks. Every rank calls it once, after it has joined the process group."""
    if not dist.is_initialized():
        return Layout(Coordinates(0, 0, 0, 0), None, None, None, None)
    parallel = config.parallel
    mesh, data = _data_mesh(config, device_type)
    return Layout(
        coordinates=coordinates(dist.get_rank(), parallel),
        data=data,
        tensor=mesh["tp"] if parallel.tp > 1 else None,
        context=context_group(config, device_type),
        pipeline=mesh["pp"].get_group() if parallel.pp > 1 else None,
        experts=_make_expert_layout(config, device_type) if parallel.ep > 1 else None,
        ends=_ends_group(config) if config.ties_ends else None,
    )


def _ends_group(config: ResolvedConfig) -> ProcessGroup | None:
    """Return the group of this rank's tied embedding; None in a stage between the ends. Every rank calls it.

    NCCL splits a group off with all ranks, so those between the ends make a group too.
    """
    rank, stage = dist.get_rank(), config.world_size // config.parallel.pp
    ends = tied_ranks(config, [rank])
    between = [it for it in range(rank % stage, config.world_size, stage) if it not in ends]
    members = list(ends) if rank in ends else between
    group = dist.new_group(members, use_local_synchronization=True)
    return group if rank in ends else None


def _make_expert_layout(config: ResolvedConfig, device_type: str) -> ExpertLayout:
    tp = config.parallel.expert_tp
    mesh, data = _data_mesh(config, device_type, config.parallel.ep, tp)
    return ExpertLayout(data, mesh["ep", "tp"] if tp > 1 else mesh["ep"], mesh["ep"].get_group())


def _data_mesh(
    config: ResolvedConfig, device_type: str, ep: int = 1, tp: int | None = None
) -> tuple[DeviceMesh, DeviceMesh]:
    """Return the mesh of all ranks, and its axes whose ranks have different tokens and, before sharding, the
    same parameters."""
    parallel = config.parallel
    tp = parallel.tp if tp is None else tp
    ranks = parallel.dp * parallel.cp * parallel.tp // (ep * tp)
    replicas = parallel.dp_replicate if config.zero.stage else ranks
    mesh = _mesh(
        device_type, pp=parallel.pp, dp_replicate=replicas, dp_shard=ranks // replicas, ep=ep, tp=tp
    )
    return mesh, mesh["dp_replicate", "dp_shard"] if replicas > 1 else mesh["dp_shard"]


def _mesh(device_type: str, **degrees: int) -> DeviceMesh:
    """Create a mesh of the axes that have more than one rank, and of dp_shard in any case."""
    axes = {name: size for name, size in degrees.items() if size > 1 or name == "dp_shard"}
    return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def context_group(config: ResolvedConfig, device_type: str) -> ProcessGroup | None:
    """Return the ranks that share a sequence with this one; None without cp. Every rank calls it."""
    parallel = config.parallel
    if parallel.cp == 1:
        return None
    others = dist.get_world_size() // (parallel.cp * parallel.tp)
    mesh = _mesh(device_type, dp_shard=others, cp=parallel.cp, tp=parallel.tp)
    return mesh["cp"].get_group()
