"""Model parallelism with DeepSpeed's engine: its process groups, pipelines and tensor parallelism.

One layer of its PipelineModule is a whole stage of ours. Its own layers split matrices of the blocks by column,
then by row; embedding, norms and head stay whole on every rank, as in DeepSpeed's AutoTP.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh

from nanoscale.config.resolved import ResolvedConfig, ResolvedParallel
from nanoscale.models.attention import DocumentEnds
from nanoscale.models.transformer import Transformer
from nanoscale.parallel.pipeline import Loss


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


StageInputs = tuple[DocumentEnds | None, Tensor, Tensor | None]
"""A micro batch's documents, or None, its targets, and the references of pairs, or None."""


class FromQueue(nn.Module):
    """A stage that reads its further inputs from a queue: the pipeline passes it only the previous stage's
    output.

    Every rank has the batches, and forward passes run in their order.
    """

    def __init__(self, stage: Transformer, queue: deque[StageInputs]) -> None:
        super().__init__()
        self.stage, self.queue = stage, queue

    def forward(self, hidden: Tensor) -> Tensor:
        return self.stage(hidden, *self.queue.popleft())


def make_module(
    stage: Transformer,
    number: int,
    parallel: ResolvedParallel,
    loss: Loss,
    queue: deque[StageInputs],
) -> Any:
    """Create the pipeline; this rank has the stage `number`. Ranks are arranged as everywhere here.

    Fill `queue` before each step with the further inputs of its micro batches.
    """
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    layers: list[nn.Module] = [nn.Identity() for _ in range(parallel.pp)]
    layers[number] = FromQueue(stage, queue)
    return PipelineModule(
        layers,
        topology=PipeModelDataParallelTopology(
            num_pp=parallel.pp, num_mp=parallel.tp, num_dp=parallel.dp * parallel.cp
        ),
        loss_fn=lambda loss_sum, _targets: loss(loss_sum),
        partition_method="uniform",
    )


def forward(
    stage: Transformer, tokens: Tensor, others: Sequence[Any], group: ProcessGroup
) -> Tensor | None:
    """Run a forward pass of `[batch, seq]`; the last stage's rank gets its output, the others None.

    Tensors are sent explicitly, since DeepSpeed's evaluation caches the shape of a batch.
    """
    rank = group.rank()
    hidden = tokens
    if not stage.first:
        dtype = next(stage.parameters()).dtype
        shape = (*tokens.shape, stage.shape.hidden)
        hidden = torch.empty(shape, dtype=dtype, device=tokens.device)
        dist.recv(hidden, group=group, group_src=rank - 1)
    hidden = stage(hidden, *others)
    if stage.last:
        return hidden
    dist.send(hidden.contiguous(), group=group, group_dst=rank + 1)
    return None


SplitDims = dict[str, int]
"""The dimension along which a parameter is divided, by name; others are whole on every rank."""

_COLUMNS = ("attention.wq", "attention.wk", "attention.wv", "mlp.gate", "mlp.up")
_ROWS = ("attention.wo", "mlp.down")


def divide(model: Transformer, group: ProcessGroup) -> SplitDims:
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
