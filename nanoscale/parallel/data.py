"""Data parallelism: what each ZeRO stage shards, and when it communicates.

| stage | mechanism | parameters are whole | gradients are reduced |
|---|---|---|---|
| 0 | DDP | always | once a step |
| 1 | FSDP2 | from the first forward to the last backward of a step | once a step |
| 2 | FSDP2 | as 1 | scattered after every micro batch |
| 3 | FSDP2 | inside a block's forward and backward only | scattered after every micro batch |

Between steps FSDP2 keeps every stage's parameters sharded, so stages 1 and 2 need less than ZeRO's definition
(Rajbhandari et al. 2020, arXiv:1910.02054) allows. Across `dp_replicate` (HSDP) gradients are all-reduced once
a step in every stage.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from nanoscale.config.schema import Config, Precision
from nanoscale.models.transformer import Transformer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


def shard(model: Transformer, config: Config, mesh: DeviceMesh | None) -> None:
    """Shard the parameters of a model on the meta device in place, as the ZeRO stage says."""
    if mesh is None or config.zero.stage == 0:
        return
    sharded = mesh if config.parallel.dp_replicate > 1 else mesh["dp_shard"]
    options: dict[str, Any] = {
        "mesh": sharded,
        "mp_policy": mixed_precision(config.precision),
        "reshard_after_forward": config.zero.stage == 3,
    }
    for layer in model.layers.values():
        fully_shard(layer, **options)
    if not model.shape.tie_embeddings:
        fully_shard(model.embed, **options)
        # The backward begins with these two: gathering them again at once would be wasted.
        fully_shard([model.norm, model.head], **options | {"reshard_after_forward": False})
    fully_shard(model, **options)


def mixed_precision(precision: Precision) -> MixedPrecisionPolicy:
    compute, params = DTYPES[precision.compute], DTYPES[precision.params]
    return MixedPrecisionPolicy(
        param_dtype=None if compute == params else compute,
        reduce_dtype=DTYPES[precision.reduce],
        output_dtype=None,
    )


def replicate(model: Transformer, mesh: DeviceMesh) -> DistributedDataParallel:
    """Wrap a replicated model in DDP. Equal initial weights are the initialisation's promise."""
    group = mesh["dp_shard"].get_group()
    return DistributedDataParallel(
        model, process_group=group, init_sync=False, gradient_as_bucket_view=True
    )


def begin_micro_batch(model: nn.Module, stage: int, last: bool) -> None:
    """Say before a forward whether its backward ends the step, so that nothing is sent in vain."""
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = last
    elif isinstance(model, FSDPModule):
        model.set_is_last_backward(last)
        model.set_requires_gradient_sync(last or stage > 1)
        model.set_requires_all_reduce(last)
        model.set_reshard_after_backward(last or stage == 3)


def reshard(model: nn.Module) -> None:
    """Free the whole parameters that a forward without a backward has left behind."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
