"""MoE over ranks: ep gives each rank some of the experts, tp a part of every expert's width, or other tokens.

With ep, one copy of a token is sent to each rank that has any of its experts, and comes back as the weighted
sum of their outputs: two all-to-alls with as many rows as the routing requires (Lepikhin et al. 2020,
arXiv:2006.16668, section 3.3, without its limit on an expert's tokens; DeepSeek-AI 2024, arXiv:2412.19437,
section 3.2.2, send one copy to a host). With tp, every rank routes all tokens in the same way, and the partial
results of an expert are summed as in a dense block. With parallel.ep_over_tp, ranks of tp belong to ep: each
routes its own part of the divided sequence (Liu et al. 2025, arXiv:2504.14960).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_reduce, wait_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn import functional as F

from nanoscale.config.resolved import ResolvedParallel
from nanoscale.models.attention import Mask
from nanoscale.models.hf_model import HFModel, expert_modules
from nanoscale.models.moe import ExpertPairs, Experts, MixtureOfExperts, count, spread, sum_rows
from nanoscale.models.rope import Rotation
from nanoscale.models.transformer import Block, Masks, Rotations, Transformer
from nanoscale.parallel.local_parameters import divide, partial_grad, replicated_grad
from nanoscale.parallel.mesh import ExpertLayout
from nanoscale.parallel.sequence_parallel import ResidualStream, collective

_WIDTH = {"gate": 1, "up": 1, "down": 2, "gate_bias": 1, "up_bias": 1, "down_bias": None}
"""The dimension of an expert's inner width, which tp divides."""
_HIDDEN = {"gate": 2, "up": 2, "down": 1}


def apply(
    model: Transformer,
    parallel: ResolvedParallel,
    tensor: DeviceMesh | None,
    experts: ExpertLayout | None,
) -> None:
    """Divide the MoE blocks of a stage on the meta device, in place."""
    if tensor is None and experts is None:
        return
    of_experts = None if parallel.ep_over_tp else tensor
    # The sum over all tokens, divided by the ranks of dp and cp: FSDP divides by the ranks of `experts.data`.
    mean = parallel.tp / (parallel.ep * parallel.expert_tp)
    for layer in model.layers.values():
        moe = layer.mlp
        if not isinstance(moe, MixtureOfExperts):  # a dense layer
            continue
        if tensor is not None:
            # Every rank has the gradient of its share of the experts, or of its share of the sequence.
            for module in filter(None, (moe.router, moe.shared_gate)):
                whole = {"weight": Replicate(), "bias": Replicate()}
                divide(module, layer, tensor, whole, partial_grad)
            stream = ResidualStream.on_mesh(tensor, parallel.sequence_parallel)
            if of_experts is not None:
                stream.wrap(moe)
            else:
                group = tensor.get_group()
                moe.router.sum_over_sequence = partial(all_reduce, reduceOp="sum", group=group)
                if moe.shared is not None:
                    stream.wrap(moe.shared)
        assert isinstance(layer, Block)
        _divide_experts(moe.experts, layer, of_experts, experts, mean)


def apply_to_foreign(model: HFModel, ep: int, layout: ExpertLayout) -> None:
    """Divide the experts of a stage of transformers' model by their number, on the meta device, in place."""
    for block in model.layers.values():
        for experts in expert_modules(block):
            experts.num_experts = count = experts.num_experts // ep
            whole = dict.fromkeys(experts._parameters, Shard(0))
            divide(experts, block, layout.expert_mesh, whole, partial(_own, 1 / ep))
            exchange = Exchange(layout.group, count, partial(_run_foreign, experts.forward, count))
            experts.forward = partial(_exchange_foreign, exchange)


def experts_of(block: nn.Module) -> list[nn.Module]:
    """Return the modules of a block that hold experts: ours, or modules of transformers' model."""
    moe = getattr(block, "mlp", None)
    if isinstance(moe, MixtureOfExperts):
        return [moe.experts]
    return expert_modules(block)


def _exchange_foreign(
    exchange: Exchange, tokens: Tensor, chosen: Tensor, weights: Tensor
) -> Tensor:
    # The numbers of experts travel with the weights, and bf16 would round them.
    exact = weights.to(torch.promote_types(weights.dtype, torch.float32))
    return exchange(tokens, exact, chosen)


def _run_foreign(
    forward: Callable[..., Tensor],
    count: int,
    tokens: Tensor,
    weights: Tensor,
    chosen: Tensor,
    n: int,
) -> Tensor:
    """Run experts as if each of `n` pairs of a token and an expert of this rank were a token."""
    pairs = ExpertPairs.of_choices(chosen, count, n)
    numbers, scales = (it.flatten()[pairs.slots].unsqueeze(1) for it in (chosen, weights))
    inputs = (spread(tokens, pairs), numbers, scales.to(tokens.dtype))
    # Without pairs, one row of zeros: the backward pass of every rank must reach the exchange and all experts.
    outputs = forward(*(F.pad(it, (0, 0, 0, int(n == 0))) for it in inputs))[:n]
    return sum_rows(outputs, pairs)


def shard_dimension(name: str, matrix: Tensor, ranks: int) -> int:
    """Return the dimension along which FSDP shards a matrix: whole experts, or `hidden` if there are too
    few."""
    local = matrix.to_local() if isinstance(matrix, DTensor) else matrix
    hidden_dim = _HIDDEN.get(name, 0)
    return hidden_dim if local.shape[0] % ranks and local.shape[hidden_dim] % ranks == 0 else 0


def _divide_experts(
    experts: Experts,
    unit: Block,
    tensor: DeviceMesh | None,
    layout: ExpertLayout | None,
    mean: float,
) -> None:
    mesh = layout.expert_mesh if layout is not None else tensor
    assert mesh is not None
    placements: dict[str, list[Placement]] = {}
    for name, width_dim in _WIDTH.items():
        by_tp = Replicate() if width_dim is None else Shard(width_dim)
        placements[name] = [Shard(0)] * (layout is not None) + [by_tp] * (tensor is not None)
    ep = layout.group.size() if layout is not None else 1
    divide(experts, unit, mesh, placements, partial(_own, mean))
    if layout is not None:
        exchange = Exchange(layout.group, len(experts.gate) // ep, experts.forward)
        experts.forward = exchange  # type: ignore[method-assign, assignment]
        if tensor is None:
            unit.forward = partial(run_in_halves, unit, exchange)  # type: ignore[method-assign]


def _own(mean: float, weight: Tensor) -> Tensor:
    """Return this rank's shard of a matrix or of biases; biases of partial results are 0 but on one rank of tp.

    Its gradient is `mean` times the sum over the tokens of all ranks of ep.
    """
    local = replicated_grad(weight)
    if mean != 1 and local.requires_grad:
        local.register_hook(lambda grad: grad * mean)
    assert isinstance(weight, DTensor)
    tp_axis = weight.device_mesh.ndim - 1
    if weight.placements[-1].is_replicate() and weight.device_mesh.get_local_rank(tp_axis):
        return local - local.detach()  # as `rank0_only`
    return local


class Sent(NamedTuple):
    """Copies of tokens that are on their way to the ranks of their experts."""

    to_ranks: ExpertPairs
    """The tokens and the ranks that have any of their experts."""
    sending: list[int]
    """The copies for each rank."""
    receiving: list[int]
    """The copies from each rank."""
    pairs: int
    """The pairs of an arriving copy and an expert of this rank."""
    tokens: Started
    """`[copies, hidden]`, not arrived yet."""
    routing: Started
    """`[copies, 2 · slots]`: weights, and the experts' numbers on their rank; not arrived yet."""


@dataclass(frozen=True)
class Exchange:
    """The `forward` of `Experts` with ep: it runs experts on the ranks that have them."""

    group: ProcessGroup
    local: int
    """The number of experts of a rank."""
    run_experts: Callable[..., Tensor]

    def __call__(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        sent = self.send(tokens, weights, chosen)
        return self.receive(sent, self.compute(sent))

    def send(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Sent:
        """Start to send one copy of a token to each rank that has any of its experts."""
        ranks, local = self.group.size(), self.local
        owners = chosen // local
        is_sent = owners.new_zeros(owners.shape[0], ranks).scatter_(1, owners, 1)
        counts = torch.stack((is_sent.sum(0), count(owners, ranks)), 1)
        sending, receiving, pairs = exchange_counts(counts, self.group.group_name).tolist()
        numbers = torch.arange(ranks, device=chosen.device)
        to_ranks = ExpertPairs.of_choices(
            torch.where(is_sent > 0, numbers, ranks), ranks, sum(sending)
        )
        owner = numbers.repeat_interleave(to_ranks.load, output_size=sum(sending))
        on_owner = chosen[to_ranks.tokens] - (owner * local).unsqueeze(1)
        on_owner = torch.where((on_owner >= 0) & (on_owner < local), on_owner, local)
        routing = torch.cat((spread(weights, to_ranks), on_owner.to(weights.dtype)), 1)
        name = self.group.group_name
        return Sent(
            to_ranks,
            sending,
            receiving,
            sum(pairs),
            start(spread(tokens, to_ranks), receiving, sending, name),
            start(routing, receiving, sending, name),
        )

    def compute(self, sent: Sent) -> Started:
        """Run this rank's experts, and start to send the weighted sums of their outputs back."""
        name = self.group.group_name
        routing = finish(sent.routing, sent.receiving, sent.sending, name)
        weights, chosen = routing.chunk(2, dim=1)
        tokens = finish(sent.tokens, sent.receiving, sent.sending, name)
        sums = self.run_experts(tokens, weights, chosen.detach().long(), sent.pairs)
        return start(sums, sent.sending, sent.receiving, name)

    def receive(self, sent: Sent, sums: Started) -> Tensor:
        """Return the sums over all experts of a token, `[tokens, hidden]`."""
        results = finish(sums, sent.sending, sent.receiving, self.group.group_name)
        return sum_rows(results, sent.to_ranks)


def run_in_halves(
    block: Block, exchange: Exchange, hidden: Tensor, rotations: Rotations, masks: Masks
) -> Tensor:
    """Run a block such that one half of the batch is on its way while the other half is computed.

    Tokens of the first half travel during attention of the second, and tokens of the second during the experts
    of the first, whose results travel during the experts of the second. The backward pass is the mirror image.
    Without a backward pass, ranks may have different numbers of rows, and all run whole batches.
    """
    if hidden.shape[0] % 2 or not torch.is_grad_enabled():
        return Block.forward(block, hidden, rotations, masks)
    moe = block.mlp
    assert isinstance(moe, MixtureOfExperts)
    halves, sent = [], []
    for number, half in enumerate(hidden.chunk(2)):
        attended = block.attend(half, *_of_half(number, rotations, masks))
        normed = block.mlp_norm(attended)
        halves.append((attended, normed))
        sent.append(exchange.send(normed.flatten(0, 1), *moe.router(normed)))
    sums = [exchange.compute(each) for each in sent]
    results = []
    for (attended, normed), each, of_experts in zip(halves, sent, sums, strict=True):
        combined = exchange.receive(each, of_experts).view(normed.shape)
        results.append(block.add_feed_forward(attended, moe.add_shared(normed, combined)))
    return torch.cat(results)


def _of_half(number: int, rotations: Rotations, masks: Masks) -> tuple[Rotations, Masks]:
    """Return the rotations and the masks of one half of the rows."""

    def turned(rotation: Rotation) -> Rotation:
        if rotation is None or rotation[0].ndim == 3:  # the rows have the same positions
            return rotation
        cosine, sine = (x.chunk(2)[number] for x in rotation)
        return cosine, sine

    def seen(mask: Mask) -> Mask:
        assert not isinstance(mask, Tensor), "of a KV cache, which has no ranks"
        return None if mask is None else mask.half(number)

    return (turned(rotations[0]), turned(rotations[1])), (seen(masks[0]), seen(masks[1]))


Started = tuple[Tensor, Tensor]
"""The rows that are on their way, and the tensor that was sent, to which the gradient returns."""


def start(x: Tensor, receiving: list[int], sending: list[int], group: str) -> Started:
    """Start an all-to-all of rows. `finish` with the same arguments waits for it.

    In the backward pass, `finish` starts the all-to-all of the gradients, and `start` waits for it.
    """
    arriving, sent = _Start.apply(x, receiving, sending, group)
    return arriving, sent


def finish(started: Started, receiving: list[int], sending: list[int], group: str) -> Tensor:
    arrived: Tensor = _Finish.apply(*started, receiving, sending, group)
    return arrived


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *exchange: Any) -> Started:
        arriving = collective.all_to_all_single(x.contiguous(), *exchange)
        ctx.mark_non_differentiable(arriving)
        ctx.set_materialize_grads(False)  # `arriving` would get zeros
        return arriving, x.view_as(x)

    @staticmethod
    def backward(ctx: Any, _: None, grad: Tensor) -> tuple[Tensor | None, ...]:
        return wait_tensor(grad), None, None, None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, arriving: Tensor, sent: Tensor, *exchange: Any) -> Tensor:
        ctx.exchange = exchange
        return wait_tensor(arriving)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        receiving, sending, group = ctx.exchange
        grad = collective.all_to_all_single(grad.contiguous(), sending, receiving, group)
        return None, grad, None, None, None


@torch.library.custom_op("nanoscale::exchange_counts", mutates_args=())
def exchange_counts(counts: Tensor, group: str) -> Tensor:
    """Exchange the numbers of copies and of pairs for each rank, `[ranks, 2]`, and copy them to the host.

    Returns `[3, ranks]`: the copies to send, the copies to receive, and the pairs that they stand for. It is
    the only wait for the device, and one operation, whose result every mode of recomputation keeps.
    """
    arriving = torch.zeros_like(counts)  # of a group without other ranks: nothing arrives
    dist.all_to_all_single(arriving, counts, group=_resolve_process_group(group))  # type: ignore[arg-type]
    numbers = torch.cat((counts[:, :1], arriving), 1).T.contiguous()
    return torch.ops.aten._to_copy(numbers, device=torch.device("cpu"))


@exchange_counts.register_fake
def _(counts: Tensor, group: str) -> Tensor:
    return counts.new_empty(3, counts.shape[0], device="cpu")
