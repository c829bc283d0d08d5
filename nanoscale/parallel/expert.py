"""Mixtures of experts over ranks: ep gives each rank some of the experts, tp a part of every expert's width.

With ep, tokens travel to the ranks that have their experts and back, by two all-to-alls of as many rows as the
routing wants (Lepikhin et al. 2020, arXiv:2006.16668, section 3.3, without its limit on an expert's tokens).
With tp, every rank of it routes all tokens alike, and the parts of an expert add up as a dense block's do.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from nanoscale.models.moe import Experts, MixtureOfExperts, Router, run_experts, sort, take
from nanoscale.models.transformer import Transformer
from nanoscale.parallel.mesh import ExpertLayout

_WIDTH = {"gate": 1, "up": 1, "down": 2}
"""the dimension of an expert's inner width, which tp divides"""
_HIDDEN = {"gate": 2, "up": 2, "down": 1}


def apply(
    model: Transformer,
    tensor: DeviceMesh | None,
    experts: ExpertLayout | None,
    sequence_parallel: bool,
) -> None:
    """Divide the mixtures of a stage on the meta device, in place."""
    if tensor is None and experts is None:
        return
    for layer in model.layers.values():
        mixture = layer.mlp
        assert isinstance(mixture, MixtureOfExperts)
        if tensor is not None:
            _divide_stream(mixture, tensor, Shard(1) if sequence_parallel else Replicate())
            _replicate_router(mixture.router, tensor)
        _divide_experts(mixture.experts, tensor, experts)


def shard_dimension(name: str, matrix: Tensor, ranks: int) -> int:
    """Along which dimension FSDP cuts a matrix: whole experts, or `hidden` where they are too few."""
    local = matrix.to_local() if isinstance(matrix, DTensor) else matrix
    other = _HIDDEN[name]
    return other if local.shape[0] % ranks and local.shape[other] % ranks == 0 else 0


# --- tp -------------------------------------------------------------------------------------------


def _divide_stream(mixture: MixtureOfExperts, mesh: DeviceMesh, stream: Shard | Replicate) -> None:
    """Route the whole sequence on every rank, and add the parts of the experts' results up."""
    inside = mixture.forward

    def forward(hidden: Tensor | DTensor) -> Tensor:
        if not isinstance(hidden, DTensor):
            hidden = DTensor.from_local(hidden, mesh, [stream], run_check=False)
        whole = hidden.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        parts = DTensor.from_local(inside(whole), mesh, [Partial()], run_check=False)
        return parts.redistribute(placements=[stream]).to_local()

    mixture.forward = forward  # type: ignore[method-assign]


def _replicate_router(router: Router, mesh: DeviceMesh) -> None:
    """Its gradient on a rank is that of the rank's part of the experts."""
    _distribute(router, "weight", mesh, [Replicate()])

    def forward(hidden: Tensor) -> tuple[Tensor, Tensor]:
        weight = router.weight
        assert isinstance(weight, DTensor)
        return router.choose(hidden, weight.to_local(grad_placements=[Partial()]))

    router.forward = forward  # type: ignore[method-assign]


# --- ep -------------------------------------------------------------------------------------------


def _divide_experts(
    experts: Experts, tensor: DeviceMesh | None, layout: ExpertLayout | None
) -> None:
    mesh = layout.divided if layout is not None else tensor
    assert mesh is not None
    for name, width in _WIDTH.items():
        placements: list[Placement] = [Shard(0)] if layout is not None else []
        if tensor is not None:
            placements.append(Shard(width))
        _distribute(experts, name, mesh, placements)
    if layout is None:
        experts.forward = partial(_run_own, experts, 1)  # type: ignore[method-assign]
    else:
        run = partial(_run_own, experts, layout.group.size())
        experts.forward = partial(_exchange, layout.group, run)  # type: ignore[method-assign]


def _run_own(experts: Experts, share: int, tokens: Tensor, load: Tensor) -> Tensor:
    own = (_own(weight, share) for weight in (experts.gate, experts.up, experts.down))
    return run_experts(tokens, load, *own)


def _own(weight: Tensor, share: int) -> Tensor:
    """This rank's part of a matrix.

    Its gradient is the sum over the tokens of all ranks of ep. FSDP then takes the mean over the ranks that are
    left, and what everything else has is the mean over all of them.
    """
    assert isinstance(weight, DTensor)
    local = weight.to_local()
    if share > 1 and local.requires_grad:
        local.register_hook(lambda grad: grad / share)
    return local


def _exchange(group: ProcessGroup, run: partial[Tensor], tokens: Tensor, load: Tensor) -> Tensor:
    """As `Experts`: tokens `[choices, hidden]` in the order of all experts, whose loads are `[experts]`."""
    ranks = group.size()
    coming = all_to_all_single_autograd(load, None, None, group).view(ranks, -1)
    sending, receiving = torch.stack((load.view(ranks, -1).sum(1), coming.sum(1))).tolist()
    arrived = all_to_all_single_autograd(tokens, receiving, sending, group)
    # They come rank by rank, and of each rank expert by expert.
    own = torch.arange(coming.shape[1], device=load.device)
    expert = own.repeat(ranks).repeat_interleave(coming.flatten(), output_size=sum(receiving))
    order, back = sort(expert)
    found = take(run(take(arrived, order, back), coming.sum(0)), back, order)
    return all_to_all_single_autograd(found, sending, receiving, group)


def _distribute(
    module: nn.Module, name: str, mesh: DeviceMesh, placements: list[Placement]
) -> None:
    whole = distribute_tensor(module.get_parameter(name), mesh, placements)
    module.register_parameter(name, nn.Parameter(whole))
