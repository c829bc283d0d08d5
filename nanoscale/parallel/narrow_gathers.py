"""Gathers of weights in 8 bits by FSDP2: a rank casts its shards, with the scales of whole matrices.

Products get bit by bit what they would make of matrices that are gathered in the compute dtype: shards are
rounded to it before the cast, and one reduction of a forward pass finds the largest number of every matrix.
The gathers move half of the bytes, and no rank casts a whole matrix.
"""

import math
from collections.abc import Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@torch.no_grad()
def prepare(parameters: Iterable[Any], compute: torch.dtype) -> None:
    """Find the scales of 8-bit products' matrices, unless they are gathered, and let FSDP2 cast their shards.

    Args:
        parameters: the parameters of a model in FSDP2 (`FSDPParam`).
        compute: the dtype in which other parameters are gathered.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
    from torchao.float8.float8_linear import Float8Linear
    from torchao.float8.float8_utils import amax_to_scale

    cast = (it for it in parameters if isinstance(it._module_info.module, Float8Linear))
    chosen = [it for it in cast if it._module_info.param_name == "weight"]
    if all(it.sharded_state is not ShardedState.SHARDED for it in chosen):
        return
    shards = [it._sharded_param_data for it in chosen]
    largest = torch.stack(torch._foreach_norm(shards, math.inf)).to(compute).float()
    dist.all_reduce(largest, dist.ReduceOp.MAX, chosen[0].mesh_info.shard_process_group)
    dtype = chosen[0]._module_info.module.config.cast_config_weight.target_dtype
    scales = amax_to_scale(largest, dtype).unbind()
    for parameter, shard, scale in zip(chosen, shards, scales, strict=True):
        # A view of it would hold its base, which holds the functions that hold the view.
        whole = shard.data.view(parameter.padded_sharded_param_size)
        _extend(parameter, whole, scale, compute, dtype)


def _extend(
    parameter: Any, shard: Tensor, scale: Tensor, compute: torch.dtype, dtype: torch.dtype
) -> None:
    """Let FSDP2 gather the cast shard. It asks the shard itself for functions."""
    from torchao.float8.float8_training_tensor import GemmInputRole, hp_tensor_and_scale_to_float8
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor as Weight

    local, config = parameter._sharded_local_tensor, parameter._module_info.module.linear_mm_config
    role = GemmInputRole.WEIGHT

    def cast(_mesh: object) -> Any:
        narrow = hp_tensor_and_scale_to_float8(shard.to(compute), scale, dtype, config, role)
        return (narrow._data,), (scale,)

    local.fsdp_pre_all_gather = cast
    local.fsdp_post_all_gather = partial(
        Weight.fsdp_post_all_gather, SimpleNamespace(_linear_mm_config=config)
    )
    if not hasattr(parameter, "_extensions_data"):
        parameter._init_extensions()
