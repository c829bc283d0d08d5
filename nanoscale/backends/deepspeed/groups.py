"""Process groups in the form that DeepSpeed's engine asks for."""

from __future__ import annotations

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh

from nanoscale.config.resolved import ResolvedConfig


class Groups:
    """The model-parallel unit of DeepSpeed's documentation; the method names are DeepSpeed's.

    Ranks of cp are data-parallel to it: they hold the same parameters for other tokens. DeepSpeed's own
    sequence parallelism would average gradients by different divisors in different stages of ZeRO.
    """

    def __init__(self, config: ResolvedConfig, device_type: str) -> None:
        parallel = config.parallel
        names = ("pp", "data", "tp")
        shape = (parallel.pp, parallel.dp * parallel.cp, parallel.tp)
        mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)
        self.pipeline: ProcessGroup = mesh["pp"].get_group()
        self.data: ProcessGroup = mesh["data"].get_group()
        self.tensor: ProcessGroup = mesh["tp"].get_group()

    def get_model_parallel_rank(self) -> int:
        return self.tensor.rank()

    def get_model_parallel_world_size(self) -> int:
        return self.tensor.size()

    def get_model_parallel_group(self) -> ProcessGroup:
        return self.tensor

    def get_data_parallel_rank(self) -> int:
        return self.data.rank()

    def get_data_parallel_world_size(self) -> int:
        return self.data.size()

    def get_data_parallel_group(self) -> ProcessGroup:
        return self.data

    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_group = get_model_parallel_group
