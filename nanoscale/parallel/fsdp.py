"""Data parallelism by FSDP2: the sharding of each ZeRO stage, and the times of its communication.

| stage | parameters are whole | gradients are reduced |
|---|---|---|
| 0 | always; every rank holds a copy | once a step |
| 1 | from the first forward to the last backward of a step | once a step |
| 2 | as 1 | scattered after every micro batch |
| 3 | inside a block's forward and backward only | scattered after every micro batch |

Stage 0 is a sharding over groups of one rank: DDP's communication, by the code of the other stages, which
supports every other axis. Without other axes and casts, `ddp` is used instead. Between steps stages 1 and 2
keep their parameters sharded, so they need less memory than ZeRO's definition (Rajbhandari et al. 2020,
arXiv:1910.02054) allows. In a pipeline every stage's parameters stay whole for the step and gradients are
reduced once, at its end: micro batches of several stages alternate there, and each would gather and scatter
everything again. Across `dp_replicate` (HSDP) gradients are all-reduced once a step in every stage.

Frozen weights, with adapters, are in the compute dtype. Where gathered weights stay for a whole step (stages 0
to 2, and pipelines), every rank has them whole and nothing gathers them. Stage 3 shards them and gathers them
with the trained ones. FSDP2 requires one dtype of the trained parameters of a unit only, also in torch 2.11.

With `zero.offload_param=cpu` shards, their gradients and the optimizer are in host memory: a block's shard is
copied to the device before it is gathered, and its reduced gradient back.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from nanoscale.common.errors import UserError
from nanoscale.config.dtypes import DTYPES
from nanoscale.config.layout import keeps_frozen_whole, narrow_weights
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.schema import Precision
from nanoscale.models.lora import frozen_matrices
from nanoscale.models.transformer import Transformer
from nanoscale.parallel import narrow_gathers
from nanoscale.parallel.expert import experts_of, shard_dimension
from nanoscale.parallel.mesh import ExpertLayout

TORCH_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, dtype.torch_name) for name, dtype in DTYPES.items()
}


def shard(
    model: Transformer, config: ResolvedConfig, mesh: DeviceMesh, experts: ExpertLayout | None
) -> None:
    """Shard the parameters of a stage on the meta device in place over all of `mesh`.

    With ep, parameters of experts are sharded over the ranks that have the same experts.
    """
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": mixed_precision(config.precision),
        "reshard_after_forward": config.zero.stage == 3 and config.parallel.pp == 1,
    }
    if config.offloads:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    if keeps_frozen_whole(config):
        options["ignored_params"] = {p for p in model.parameters() if not p.requires_grad}
    elif config.lora.base == "nf4":
        options["ignored_params"] = {layer.weight for layer in frozen_matrices(model)}
    for layer in model.layers.values():
        fully_shard(layer, **options, shard_placement_fn=_expert_placement(layer, mesh, experts))
    if model.first and model.has_separate_head:
        fully_shard(model.embed, **options)
    if model.last and model.has_separate_head:
        # The backward begins with these two: freeing them and gathering them again at once would be wasteful.
        fully_shard([model.norm, model.head], **options | {"reshard_after_forward": False})
    fully_shard(model, **options)
    if config.precision.reduce in ("bf16", "fp16"):
        _add_in_fp32(model, TORCH_DTYPES[config.precision.reduce])
    if narrow_weights(config):
        # Runs before FSDP2's own hook, which begins to gather. A hook that had the parameters would keep them.
        compute = TORCH_DTYPES[config.precision.compute]
        model.register_forward_pre_hook(partial(_cast_gathers, compute), prepend=True)
    # FSDP2 gathers one block ahead if the host is ahead; with ep the host waits in every block.
    if config.zero.prefetch > 1 or experts is not None:
        _prefetch(list(model.layers.values()), config.zero.prefetch)
    if config.parallel.pp == 1 and config.model.source == "own":
        _free_buffers_before_loss(model)


def _cast_gathers(compute: torch.dtype, model: nn.Module, _inputs: object) -> None:
    parameters = (parameter for group in _groups(model) for parameter in group.fsdp_params)
    narrow_gathers.prepare(parameters, compute)


def _add_in_fp32(model: nn.Module, reduce_dtype: torch.dtype) -> None:
    """Make FSDP2 add the gradients of micro batches that wait for their reduction in fp32, and send them in
    `reduce_dtype`; by itself it adds them in the dtype of the reduction, and each sum is rounded."""

    def separate(group: Any, init: Callable[[], None]) -> None:
        init()
        group._reduce_dtype = reduce_dtype  # of what is sent
        for parameter in group.fsdp_params:
            parameter.reduce_dtype = torch.float32  # of what is added

    for group in _groups(model):
        group._init_mp_dtypes = partial(separate, group, group._init_mp_dtypes)


def _groups(model: nn.Module) -> Iterator[Any]:
    """Yield the groups of parameters that FSDP2 gathers together."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            yield from (it for it in groups if it is not None)


def _prefetch(layers: list[Any], depth: int) -> None:
    """Let each block gather the blocks that follow it, in the forward and in the backward pass."""
    for number, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[number + 1 : number + 1 + depth])
        layer.set_modules_to_backward_prefetch(layers[max(0, number - depth) : number][::-1])


def _free_buffers_before_loss(model: Transformer) -> None:
    """Make FSDP2 free two buffers before the loss, where a step needs the most memory.

    The first is the input of the last reduction of the previous micro batch, which is the gradient of the
    whole embedding: FSDP2 keeps it until its next reduction. The second is the flat gather of the norm and the
    head, which it keeps until the forward pass is over.
    """
    # Runs before FSDP2's own hook, which gathers the norm and the head, and after it.
    model.norm.register_forward_pre_hook(lambda *_: _free_reductions(model), prepend=True)
    model.head.register_forward_pre_hook(lambda *_: _free_gather(model))


# As in torch.distributed.fsdp._fully_shard (`_fsdp_param_group`, `_fsdp_state`), the next user of the memory
# waits for the last operation that has read it.


def _free_reductions(model: nn.Module) -> None:
    context = _comm_context(model)
    reductions = getattr(context, "reduce_scatter_states", None)
    if reductions is None:  # before torch 2.13 there was at most one
        reductions = [context.reduce_scatter_state] if context.reduce_scatter_state else []
        context.reduce_scatter_state = None
    for reduction in reductions:
        if reduction.event is not None:
            context.device_handle.current_stream().wait_event(reduction.event)
    reductions.clear()


def _free_gather(model: nn.Module) -> None:
    context = _comm_context(model)
    gathered, context.all_gather_state = context.all_gather_state, None
    if gathered is not None and gathered.event is not None:
        context.all_gather_copy_in_stream.wait_event(gathered.event)
        context.all_gather_stream.wait_event(gathered.event)


def _comm_context(model: nn.Module) -> Any:
    return model._get_fsdp_state()._comm_ctx  # type: ignore[operator]


def _expert_placement(
    block: nn.Module, mesh: DeviceMesh, layout: ExpertLayout | None
) -> Callable[[nn.Parameter], Any] | None:
    """Return the ranks and the dimension over which each parameter is sharded: experts, or others by rows.

    The block gathers experts with all of its parameters: a unit of their own would gather within the region
    that activation checkpointing runs twice.

    Raises:
        UserError: this torch is too old for ep.
    """
    modules = experts_of(block)
    if not modules:
        return None
    sharding_mesh = mesh if layout is None else layout.data
    ranks = sharding_mesh.size(sharding_mesh.ndim - 1)
    placements = {
        parameter: Shard(shard_dimension(name, parameter, ranks))
        for experts in modules
        for name, parameter in experts.named_parameters()
    }
    if layout is None:
        return placements.get
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_common import (
            FSDPMeshInfo,
            HSDPMeshInfo,
            ShardPlacementResult,
        )
    except ImportError as error:  # before torch 2.12 all parameters of a unit had one sharding
        text = f"parallel.ep={layout.group.size()} needs torch 2.12 or newer, and this is {torch.__version__}"
        raise UserError("layout", text) from error
    mesh_info = FSDPMeshInfo(sharding_mesh, shard_mesh_dim=0)
    if sharding_mesh.ndim == 2:
        mesh_info = HSDPMeshInfo(sharding_mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    return {
        parameter: ShardPlacementResult(placement, mesh_info)
        for parameter, placement in placements.items()
    }.get


def mixed_precision(precision: Precision) -> MixedPrecisionPolicy:
    compute, params = TORCH_DTYPES[precision.compute], TORCH_DTYPES[precision.params]
    return MixedPrecisionPolicy(
        param_dtype=None if compute == params else compute,
        reduce_dtype=TORCH_DTYPES[precision.reduce],
        output_dtype=None,
    )


def begin_micro_batch(model: nn.Module, stage: int, last: bool) -> None:
    """Set before a forward whether its backward ends the step, so that nothing is sent needlessly."""
    if isinstance(model, FSDPModule):
        model.set_is_last_backward(last)
        model.set_requires_gradient_sync(last or stage > 1)
        model.set_requires_all_reduce(last)
        model.set_reshard_after_backward(last or stage == 3)
        # FSDP2 prefetches in the order of all forward passes of a step. At the end of a backward pass it would
        # needlessly gather the last units of the previous forward pass: the norm and the head.
        getattr(_comm_context(model), "post_forward_order", []).clear()


def reshard(model: nn.Module) -> None:
    """Free the gathered parameters that a forward without a backward has left."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
