"""The ranks arranged in the axes of the layout."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from nanoscale.config.schema import Parallel


def data_mesh(parallel: Parallel, device_type: str) -> DeviceMesh | None:
    """The data-parallel ranks, `[dp_replicate, dp_shard]`; None where there is one process."""
    if not dist.is_initialized():
        return None
    assert isinstance(parallel.dp, int), "the launcher freezes a number"
    shape = (parallel.dp_replicate, parallel.dp // parallel.dp_replicate)
    return init_device_mesh(device_type, shape, mesh_dim_names=("dp_replicate", "dp_shard"))
