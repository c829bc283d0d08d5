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
from nanoscale.models.hf_model import HFModel, expert_modules
from nanoscale.models.moe import (
    ExpertPairs,
    MixtureOfExperts,
    count,
    is_recomputed,
    spread,
    sum_rows,
)
from nanoscale.models.rope import Rotation
from nanoscale.models.transformer import Block, Masks, Rotations, Transformer
from nanoscale.parallel.local_parameters import divide, partial_grad, replicated_grad
from nanoscale.parallel.mesh import ExpertLayout
from nanoscale.parallel.sequence_parallel import ResidualStream, collective

_WIDTH: dict[str, Placement] = dict.fromkeys(("gate", "up", "gate_bias", "up_bias"), Shard(1))
_WIDTH |= {"down": Shard(2), "down_bias": Replicate()}
"""The placements over the ranks of tp, which divides an expert's inner width."""
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
    blocks: Any = model.layers.values()
    for layer in blocks:
        moe = layer.mlp
        if not isinstance(moe, MixtureOfExperts):  # a dense layer
            continue
        if tensor is not None:
            # Every rank has the gradient of its share of the experts, or of its share of the sequence.
            for module in filter(None, (moe.router, moe.shared_gate)):
                whole = {"weight": Replicate(), "bias": Replicate()}
                divide(module, layer, tensor, whole, partial_grad)
            stream = ResidualStream.on_mesh(tensor, parallel.sequence_parallel)
            if experts is None:
                stream.wrap(moe)
            elif of_experts is None:
                group = tensor.get_group()
                moe.router.sum_over_sequence = partial(all_reduce, reduceOp="sum", group=group)
                if moe.shared is not None:
                    stream.wrap(moe.shared)
        over_ep, over_tp = [Shard(0)] * (experts is not None), int(of_experts is not None)
        placements = {name: [*over_ep, *[width] * over_tp] for name, width in _WIDTH.items()}
        mesh: Any = tensor if experts is None else experts.expert_mesh
        divide(moe.experts, layer, mesh, placements, partial(_own, mean))
        if experts is not None:
            parts = BlockInParts(layer, experts.group, stream if over_tp else None)
            layer.forward = layer.parts = parts


def apply_to_foreign(model: HFModel, ep: int, layout: ExpertLayout) -> None:
    """Divide the experts of a stage of transformers' model by their number, on the meta device, in place."""
    for block in model.layers.values():
        for experts in expert_modules(block):
            experts.num_experts = count = experts.num_experts // ep
            whole = dict.fromkeys(experts._parameters, Shard(0))
            divide(experts, block, layout.expert_mesh, whole, partial(_own, 1 / ep))
            exchange = Exchange(layout.group, count, partial(_run_foreign, experts.forward, count))
            experts.forward = partial(_exchange_foreign, exchange)


def experts_of(block: nn.Module) -> list[Any]:
    """Return the modules of a block that hold experts: ours, or modules of transformers' model."""
    moe = getattr(block, "mlp", None)
    if isinstance(moe, MixtureOfExperts):
        return [moe.experts]
    return expert_modules(block)


def parts_of(block: nn.Module, kind: str) -> list[tuple[Any, str]]:
    """Return the functions of a block that are `recomputed` or `compiled` by themselves: owners and names."""
    parts = getattr(block, "parts", None)
    return [(block, "forward")] if parts is None else getattr(parts, kind)


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
    """Return the dimension along which FSDP shards a matrix: whole experts, or `hidden` if they are too few."""
    local = matrix.to_local() if isinstance(matrix, DTensor) else matrix
    hidden_dim = _HIDDEN.get(name, 0)
    return hidden_dim if local.shape[0] % ranks and local.shape[hidden_dim] % ranks == 0 else 0


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
    there: tuple[list[int], list[int], str]
    """The copies from each rank, the copies for each rank, and the group."""
    pairs: int
    """The pairs of an arriving copy and an expert of this rank."""
    travelling: list[Started]
    """Tokens, `[copies, hidden]`, and their routing, `[copies, 2 · slots]` (weights, and the experts' numbers
    on their rank), which have not arrived yet."""


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
        there = receiving, sending, self.group.group_name
        travelling = [start(it, *there) for it in (spread(tokens, to_ranks), routing)]
        return Sent(to_ranks, there, sum(pairs), travelling)

    def compute(self, sent: Sent, is_read: bool = True) -> Started:
        """Run this rank's experts, and start to send the weighted sums of their outputs back, if `is_read`."""
        # Copies that have arrived are freed where they came from.
        tokens, routing = (finish(sent.travelling.pop(0), *sent.there) for _ in range(2))
        weights, chosen = routing.chunk(2, dim=1)
        sums = self.run_experts(tokens, weights, chosen.detach().long(), sent.pairs)
        receiving, sending, name = sent.there
        if not is_read:
            return sums.new_empty(1).expand(sum(sending), sums.shape[1]), sums
        return start(sums, sending, receiving, name)

    def receive(self, sent: Sent, sums: Started) -> Tensor:
        """Return the sums over all experts of a token, `[tokens, hidden]`."""
        receiving, sending, name = sent.there
        return sum_rows(finish(sums, sending, receiving, name), sent.to_ranks)


class BlockInParts:
    """The `forward` of a block with ep. Its parts are recomputed and compiled separately. The exchanges between
    parts are not compiled, so that they keep their order on every rank.

    Tokens of one half of the batch travel during attention of the other half, and tokens of this one during the
    experts of the first, whose results travel during the experts of the second. The backward pass is the mirror
    image. Batches stay whole without a backward pass, in which ranks may have different numbers of rows, and if
    tp divides every expert's width.
    """

    def __init__(self, block: Block, group: ProcessGroup, stream: ResidualStream | None) -> None:
        moe: Any = block.mlp
        self.block, self.moe, self.stream = block, moe, stream
        """The stream over the ranks that have a part of every expert; None if they have whole experts."""
        self.repeats_results = True
        """True if recomputation reads the experts' results, which only a norm after them does."""
        self.compiled = [(block, "attend"), (moe.experts, "forward"), (self, "add")]
        modules = [it for it in (moe.experts, moe.shared) if it is not None]
        self.recomputed = [(block, "attend"), (self, "route"), *((it, "forward") for it in modules)]
        self.exchange = Exchange(group, len(moe.experts.gate) // group.size(), self._run_experts)

    def __call__(self, hidden: Tensor, rotations: Rotations, masks: Masks) -> Tensor:
        halves = self.stream is None and hidden.shape[0] % 2 == 0 and torch.is_grad_enabled()
        sent = []
        for number, rows in enumerate(hidden.chunk(1 + halves)):
            others = _of_half(number, rotations, masks) if halves else (rotations, masks)
            attended = self.block.attend(rows, *others)
            normed, *routing = self.route(attended)
            sent.append((attended, normed, self.exchange.send(normed.flatten(0, 1), *routing)))
        is_read = self.repeats_results or not is_recomputed()
        sums = [self.exchange.compute(tokens, is_read) for *_, tokens in sent]
        results = []
        for attended, normed, tokens in sent:
            combined = self.exchange.receive(tokens, sums.pop(0))
            results.append(self.add(attended, normed, combined))
        return torch.cat(results) if halves else results[0]

    def route(self, attended: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the input of the MoE, and the weights and the numbers of its tokens' experts."""
        normed = self.block.mlp_norm(attended)
        normed = normed if self.stream is None else self.stream.gather(normed)
        return (normed, *self.moe.router(normed))

    def _run_experts(self, tokens: Tensor, weights: Tensor, chosen: Tensor, pairs: int) -> Tensor:
        """Run experts on a row of zeros if there are no tokens, which a GPU's kernel does not support."""
        if pairs == 0:
            tokens, weights, chosen = (F.pad(it, (0, 0, 0, 1)) for it in (tokens, weights, chosen))
            return self._run_experts(tokens, weights, chosen, chosen.shape[1])[:0]
        return self.moe.experts(tokens, weights, chosen, tokens.new_empty(pairs, 0))

    def add(self, attended: Tensor, normed: Tensor, combined: Tensor) -> Tensor:
        output = self.moe.add_shared(normed, combined.view(normed.shape))
        output = output if self.stream is None else self.stream.reduce(output)
        return self.block.add_feed_forward(attended, output)


def _of_half(number: int, rotations: Any, masks: Any) -> tuple[Rotations, Masks]:
    """Return the rotations and the masks of one half of the rows, which may share their positions."""

    def turned(rotation: Any) -> Rotation:
        shared = rotation is None or rotation[0].ndim == 3
        return rotation if shared else tuple(x.chunk(2)[number] for x in rotation)

    whole, windowed = (None if mask is None else mask.half(number) for mask in masks)
    return (turned(rotations[0]), turned(rotations[1])), (whole, windowed)


Started = tuple[Tensor, Tensor]
"""The rows that are on their way, and the tensor that was sent, to which the gradient returns."""


def start(x: Tensor, receiving: list[int], sending: list[int], group: str) -> Started:
    """Start an all-to-all of rows. `finish` with the same arguments waits for it.

    In the backward pass, `finish` starts the all-to-all of the gradients, and `start` waits for it.
    """
    return _Start.apply(x, receiving, sending, group)


def finish(started: Started, receiving: list[int], sending: list[int], group: str) -> Tensor:
    return _Finish.apply(*started, receiving, sending, group)


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


exchange_counts.register_fake(lambda counts, _: counts.new_empty(3, counts.shape[0], device="cpu"))
