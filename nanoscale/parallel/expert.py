"""MoE over ranks: ep gives each rank some of the experts, tp a part of every expert's width.

With ep, tokens are sent to the ranks of their experts and back, by two all-to-alls with as many rows as the
routing requires (Lepikhin et al. 2020, arXiv:2006.16668, section 3.3, without its limit on an expert's
tokens). With tp, every rank routes all tokens in the same way, and the partial results of an expert are summed
as in a dense block.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from nanoscale.models.moe import Experts, MixtureOfExperts, gather_rows, sort
from nanoscale.models.transformer import Transformer
from nanoscale.parallel.local_parameters import divide, partial_grad, replicated_grad
from nanoscale.parallel.mesh import ExpertLayout
from nanoscale.parallel.sequence_parallel import ResidualStream

_WIDTH = {"gate": 1, "up": 1, "down": 2, "gate_bias": 1, "up_bias": 1, "down_bias": None}
"""The dimension of an expert's inner width, which tp divides."""
_HIDDEN = {"gate": 2, "up": 2, "down": 1}


def apply(
    model: Transformer,
    tensor: DeviceMesh | None,
    experts: ExpertLayout | None,
    sequence_parallel: bool,
) -> None:
    """Divide the MoE blocks of a stage on the meta device, in place."""
    if tensor is None and experts is None:
        return
    for layer in model.layers.values():
        moe = layer.mlp
        if not isinstance(moe, MixtureOfExperts):  # a dense layer
            continue
        if tensor is not None:
            # Every rank routes the whole sequence, and has the gradient of its share of the experts.
            for module in filter(None, (moe.router, moe.shared_gate)):
                whole = {"weight": Replicate(), "bias": Replicate()}
                divide(module, layer, tensor, whole, partial_grad)
            ResidualStream.on_mesh(tensor, sequence_parallel).wrap(moe)
        _divide_experts(moe.experts, layer, tensor, experts)


def shard_dimension(name: str, matrix: Tensor, ranks: int) -> int:
    """Return the dimension along which FSDP shards a matrix: whole experts, or `hidden` if there are too
    few."""
    local = matrix.to_local() if isinstance(matrix, DTensor) else matrix
    hidden_dim = _HIDDEN.get(name, 0)
    return hidden_dim if local.shape[0] % ranks and local.shape[hidden_dim] % ranks == 0 else 0


def _divide_experts(
    experts: Experts, unit: nn.Module, tensor: DeviceMesh | None, layout: ExpertLayout | None
) -> None:
    mesh = layout.expert_mesh if layout is not None else tensor
    assert mesh is not None
    placements: dict[str, list[Placement]] = {
        name: [
            *([Shard(0)] if layout is not None else []),
            *([_along(width_dim)] if tensor is not None else []),
        ]
        for name, width_dim in _WIDTH.items()
    }
    ep = layout.group.size() if layout is not None else 1
    divide(experts, unit, mesh, placements, partial(_own, ep))
    if layout is not None:
        experts.forward = partial(_exchange, layout.group, experts.forward)  # type: ignore[method-assign]


def _along(dimension: int | None) -> Placement:
    return Replicate() if dimension is None else Shard(dimension)


def _own(ep: int, weight: Tensor) -> Tensor:
    """Return this rank's shard of a matrix or of biases; biases of partial results are 0 but on one rank of tp.

    Its gradient is the sum over the tokens of all ranks of ep. FSDP then averages over the remaining ranks;
    all other gradients are averaged over all ranks.
    """
    local = replicated_grad(weight)
    if ep > 1 and local.requires_grad:
        local.register_hook(lambda grad: grad / ep)
    assert isinstance(weight, DTensor)
    tp_axis = weight.device_mesh.ndim - 1
    if weight.placements[-1].is_replicate() and weight.device_mesh.get_local_rank(tp_axis):
        return local - local.detach()  # as `rank0_only`
    return local


def _exchange(
    group: ProcessGroup, run_experts: Callable[..., Tensor], tokens: Tensor, load: Tensor
) -> Tensor:
    """Run `Experts` on other ranks: tokens `[choices, hidden]`, sorted by expert, whose loads are
    `[experts]`."""
    ranks = group.size()
    arriving_load = all_to_all_single_autograd(load, None, None, group).view(ranks, -1)
    sending, receiving = torch.stack((load.view(ranks, -1).sum(1), arriving_load.sum(1))).tolist()
    arrived = all_to_all_single_autograd(tokens, receiving, sending, group)
    # They arrive rank by rank, and from each rank expert by expert.
    local_experts = torch.arange(arriving_load.shape[1], device=load.device)
    expert_of_row = local_experts.repeat(ranks).repeat_interleave(
        arriving_load.flatten(), output_size=sum(receiving)
    )
    order, inverse = sort(expert_of_row)
    outputs = gather_rows(
        run_experts(gather_rows(arrived, order, inverse), arriving_load.sum(0)), inverse, order
    )
    return all_to_all_single_autograd(outputs, sending, receiving, group)
