"""The time of data parallelism on a rank in a step: gathers of parameters, reductions of gradients, copies.

A collective that runs in parallel with a block's computation costs max(0, collective - computation) seconds.
The time in which the device both computes and copies costs the share `Efficiency.overlap` of itself.
`parallel.fsdp` describes when the native backend communicates. DeepSpeed's ZeRO stages: Rajbhandari et al.
2020, arXiv:1910.02054, sections 5 and 7.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from nanoscale.config import parameters
from nanoscale.config.layout import keeps_frozen_whole, narrow_weights
from nanoscale.config.model_math import adapted_layers
from nanoscale.config.optimizers import MUON_AT_ONCE, MUON_ITERATIONS, rounds, rule_of
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.schema import Model
from nanoscale.plan.hardware.hardware import DTENSOR_S, NANOSCALE, Hardware, Software
from nanoscale.plan.memory.shards import RankParameters
from nanoscale.plan.time import collectives, operations
from nanoscale.plan.time.block import adapters, linears, micro_batch_shape
from nanoscale.plan.time.micro_batch_shape import MicroBatchShape

_ROUNDED = {"fp32": 5.0, "bf16": 7.0}
"""Reads and writes of a stochastically rounded update, in tensors of the parameter's size: weights, both bf16
moments and the gradient, by one compiled kernel."""
_PER_TENSOR = 3
"""Operations of the update for each tensor: norm, clipping, optimizer."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The collectives for the parameters and gradients of one block, and their number in a step."""

    gather: float
    """Seconds to gather one block's parameters in a forward pass."""
    gather_backward: float
    """Seconds of the gather in a backward pass. DeepSpeed can use a secondary sharding there (`zero.hpz`)."""
    reduce: float
    """Seconds to reduce-scatter one block's gradients."""
    all_reduce: float
    """Seconds to sum one block's reduced gradients over the replicas, once a step."""
    gather_copies: float
    """Seconds in which a gather reads and writes the device's memory."""
    reduce_copies: float
    """Seconds in which a reduction reads and writes the device's memory."""
    accumulate: float
    """Seconds to add one micro batch's gradients to the accumulated gradients."""
    gathers: int
    """Forward passes of a step that gather."""
    gathers_backward: int
    """Backward passes of a step that gather."""
    reduces: int
    """Backward passes of a step that reduce."""
    overlapped: bool
    """True if gradients are communicated in parallel with the backward pass."""
    after_update: float
    """Seconds to gather one block's updated parameters after the update."""
    device: tuple[float, float, float, float]
    """The seconds of `gather`, `gather_backward`, `reduce` and `all_reduce` in which the device copies
    (`collectives.with_copying`)."""
    ends: bool = True
    """True if embedding and head are gathered and reduced, too."""


def shards(config: ResolvedConfig) -> int:
    """Return the number of ranks that a parameter's optimizer states are sharded over."""
    layout = config.parallel
    if config.zero.stage == 0:
        return 1
    return layout.dp * layout.cp // layout.dp_replicate


@lru_cache(maxsize=1024)
def block_parameters(model: Model, tp: int, ep: int = 1, expert_tp: int | None = None) -> int:
    """Return the parameters of one block on a rank of tp, without biases. tp does not divide the norms."""
    return sum(p.parameters for p in linears(model, tp, ep, expert_tp)) + 2 * model.hidden


@lru_cache(maxsize=1024)
def expert_parameters(model: Model, tp: int, ep: int) -> int:
    """Return the parameters of one block's experts on a rank."""
    table = parameters.block(model).values()
    return sum(math.prod(each.local(tp, ep)) for each in table if each.is_expert)


def rank_parameters(
    model: Model, tp: int, holding: RankParameters, ep: int = 1, expert_tp: int | None = None
) -> int:
    """Return the parameters of a rank before ZeRO, without biases. Tied embedding and head count once."""
    table = model.vocab * model.hidden // tp
    shared = holding.first and holding.last and model.tie_embeddings
    tables = 1 if shared else holding.first + holding.last
    return holding.blocks * block_parameters(model, tp, ep, expert_tp) + tables * table


def updated_parameters(config: ResolvedConfig, holding: RankParameters) -> float:
    """Return the number of parameters that a rank updates.

    ZeRO shards experts over 1/ep of the ranks, because the ranks of ep hold different experts.
    """
    if holding.adapters is not None:
        return holding.adapters.shard
    model, layout, ranks = config.model, config.parallel, shards(config)
    experts = holding.blocks * expert_parameters(model, layout.expert_tp, layout.ep)
    every = rank_parameters(model, layout.tp, holding, layout.ep, layout.expert_tp)
    return (every - experts) / ranks + experts / max(1, ranks // layout.data_ep)


def tied_embedding(config: ResolvedConfig, hardware: Hardware) -> float:
    """Return the seconds to sum the gradients of a tied embedding of both ends of a pipeline, once a step."""
    if not config.ties_ends:
        return 0.0
    layout, model = config.parallel, config.model
    stage = config.world_size // layout.pp
    ends = collectives.group(hardware, 2, (layout.pp - 1) * stage)
    size = model.vocab * model.hidden / layout.tp / shards(config)
    return collectives.all_reduce(hardware, ends, size * operations.WIDTH[config.precision.params])


def plan(
    config: ResolvedConfig, hardware: Hardware, micro_batches: int, software: Software = NANOSCALE
) -> Plan:
    """Return the collectives of one block, for either backend."""
    layout, zero = config.parallel, config.zero
    weight_bytes = operations.WIDTH[config.precision.compute]
    grad_bytes = operations.WIDTH[config.precision.reduce]
    size = block_parameters(config.model, layout.tp, layout.ep, layout.expert_tp)
    peers = layout.dp * layout.cp
    if config.backend.name == "deepspeed":
        return _deepspeed(config, hardware, micro_batches, size)
    experts = expert_parameters(config.model, layout.expert_tp, layout.ep)
    saved = (weight_bytes - 1) * narrow_weights(config) * software.torchao
    costs = _seconds(config, hardware, 1, size - experts, saved)
    if experts:
        of_experts = _seconds(config, hardware, layout.data_ep, experts)
        costs = tuple((a + c, b + d) for (a, b), (c, d) in zip(costs, of_experts, strict=True))
    trained, whole = size, keeps_frozen_whole(config)
    if config.lora.rank:
        trained = sum(p.parameters for p in adapters(micro_batch_shape(config)))
        of_trained = _seconds(config, hardware, 1, trained)
        costs = of_trained if whole else (costs[0], *of_trained[1:])
        size = trained if whole else size
    (gather, near_gather), (reduce, near_reduce), (all_reduce, near_all_reduce) = costs
    each_micro_batch = zero.stage == 3 and layout.pp == 1
    # One rank whose weights have the dtype of its products computes with the weights themselves.
    same_dtype = config.precision.compute == config.precision.params
    copied = 0 if software.distributed_optimizer or (peers == 1 and same_dtype) else 1
    return Plan(
        gather=gather,
        gather_backward=gather,
        reduce=reduce,
        all_reduce=all_reduce,
        gather_copies=copied
        * operations.elementwise(hardware, 2.0 * (weight_bytes * size - saved)),
        reduce_copies=copied
        * operations.elementwise(hardware, (weight_bytes + grad_bytes) * trained),
        accumulate=operations.elementwise(hardware, (weight_bytes + 2 * grad_bytes) * trained),
        gathers=micro_batches if each_micro_batch else 1,
        gathers_backward=micro_batches if each_micro_batch else 0,
        reduces=micro_batches if zero.stage >= 2 and layout.pp == 1 else 1,
        overlapped=layout.pp == 1 or software.distributed_optimizer,
        after_update=0.0,
        device=(near_gather, near_gather, near_reduce, near_all_reduce),
        ends=not whole,
    )


def _seconds(
    config: ResolvedConfig, hardware: Hardware, ep: int, size: int, saved: float = 0
) -> tuple[tuple[float, float], ...]:
    """Return the seconds to gather `size` parameters, to reduce-scatter their gradients and to sum the shards
    over replicas, each with the seconds in which the device copies.

    The parameters are on every ep-th rank of data parallelism: ep = 1 for all but experts. `saved` bytes are
    not gathered.
    """
    grad_bytes = operations.WIDTH[config.precision.reduce]
    layout, shard = config.parallel, max(1, shards(config) // ep)
    ranks = collectives.group(hardware, shard, layout.tp * ep)
    # The ranks that have the same shard, one in each replica.
    replicas = layout.dp * layout.cp // ep // shard
    same = collectives.group(hardware, replicas, layout.tp * ep * shard)
    return (
        collectives.with_copying(
            hardware, ranks, size * operations.WIDTH[config.precision.compute] - saved
        ),
        collectives.with_copying(hardware, ranks, size * grad_bytes),
        collectives.with_copying(hardware, same, size / shard * grad_bytes, collectives.all_reduce),
    )


def _deepspeed(config: ResolvedConfig, hardware: Hardware, micro_batches: int, size: int) -> Plan:
    """Return the collectives of one block with DeepSpeed.

    Parameters stay in the compute dtype. Gradients are reduced in buckets, in parallel with the backward pass
    if `backend.overlap_comm` says so. Stages 1 and 2 gather the updated parameters after the update. Stage 3
    gathers before each use, in the backward pass within `zero.hpz` ranks. ZeRO++ (Wang et al. 2023,
    arXiv:2306.10209) can gather parameters in 8 bits and reduce gradients in 4 bits.
    """
    layout, zero, backend = config.parallel, config.zero, config.backend
    weight_bytes = operations.WIDTH[config.precision.compute]
    grad_bytes = operations.WIDTH[config.precision.reduce]
    ranks = collectives.group(hardware, layout.dp * layout.cp, layout.tp)
    secondary = collectives.group(hardware, zero.hpz, layout.tp) if zero.hpz > 1 else ranks
    stage3 = zero.stage == 3
    sent_weight_bytes = 1 if zero.quantized_weights else weight_bytes
    sent_grad_bytes = 0.5 if zero.quantized_gradients else grad_bytes
    gather, near = collectives.with_copying(hardware, ranks, size * sent_weight_bytes)
    backward, near_backward = collectives.with_copying(
        hardware, secondary, size * sent_weight_bytes
    )
    reduce, near_reduce = collectives.with_copying(hardware, ranks, size * sent_grad_bytes)
    times = 1 if zero.stage else 2  # an all-reduce
    overlap = backend.overlap_comm == "on" or (backend.overlap_comm == "auto" and stage3)
    copies = operations.elementwise(hardware, 2.0 * weight_bytes * size)
    return Plan(
        gather=gather if stage3 else 0.0,
        gather_backward=backward if stage3 else 0.0,
        reduce=times * reduce,
        all_reduce=0.0,
        gather_copies=copies if stage3 else 0.0,
        reduce_copies=operations.elementwise(hardware, (weight_bytes + grad_bytes) * size),
        accumulate=operations.elementwise(hardware, (weight_bytes + 2 * grad_bytes) * size),
        gathers=micro_batches if stage3 else 0,
        gathers_backward=micro_batches if stage3 else 0,
        reduces=micro_batches if zero.stage >= 2 else 1,
        overlapped=overlap and zero.stage > 0,
        after_update=gather if zero.stage in (1, 2) else 0.0,
        device=(near, near_backward, times * near_reduce, 0.0),
    )


def cost(
    hardware: Hardware,
    shape: MicroBatchShape,
    holding: RankParameters,
    plan: Plan,
    micro_batches: int,
    forward: float,
    backward: float,
) -> float:
    """Return the seconds that data parallelism adds to a step of a rank whose blocks take `forward` and
    `backward` seconds each for a micro batch: exposed collectives, the computation that hidden ones slow down,
    and copies.

    Embedding and head count as `table` blocks each, by their number of parameters.
    """
    blocks, model = holding.blocks, shape.model
    block = block_parameters(model, shape.tp, shape.ep, shape.expert_tp)
    table = model.vocab * model.hidden / shape.tp / block
    tables = (holding.first + holding.last) * plan.ends
    units = blocks + table * (min(1, tables) if model.tie_embeddings else tables)
    first_unit = table if holding.first else 1

    def seconds(
        times: int, collective: float, near: float, computation: float | None, uncovered: float
    ) -> float:
        """Return the seconds that a collective for each block adds to the step, `times` times.

        It overlaps with each block's computation, if that is given. No computation overlaps with `uncovered`
        seconds for the first unit. The device copies for `near` seconds of the collective.
        """
        if not collective:
            return 0.0
        visible = collective * units
        if computation is not None:
            longer = max(0.0, collective - computation)
            visible = min(visible, uncovered * first_unit + longer * (blocks - 1))
        slowdown = near * (units - visible / collective)
        return times * (visible + hardware.efficiency.overlap * slowdown)

    # The first gather of a forward pass and the last reduction of a backward pass overlap with nothing.
    both_times = min(plan.reduces, plan.gathers_backward)
    near_gather, near_backward, near_reduce, near_all_reduce = plan.device
    both, near_both = plan.gather_backward + plan.reduce, near_backward + near_reduce
    during = backward if plan.overlapped else None
    # FSDP2 sums over replicas on a stream of its own, in parallel with what other collectives leave of the
    # backward pass.
    left = max(0.0, backward - (both if both_times else plan.reduce)) if plan.overlapped else None
    gathers, reduces = plan.gathers_backward - both_times, plan.reduces - both_times
    communicated = (
        seconds(plan.gathers, plan.gather, near_gather, forward, plan.gather)
        + seconds(both_times, both, near_both, during, plan.reduce)
        + seconds(gathers, plan.gather_backward, near_backward, during, 0.0)
        + seconds(reduces, plan.reduce, near_reduce, during, plan.reduce)
        + seconds(1, plan.all_reduce, near_all_reduce, left, plan.all_reduce)
    )
    copies = plan.gather_copies * (plan.gathers + plan.gathers_backward)
    copies += plan.reduce_copies * plan.reduces
    if not shape.software.sums_in_products:
        copies += plan.accumulate * (micro_batches - plan.reduces)
    return communicated + (plan.after_update + copies) * units


def _orthogonalized(config: ResolvedConfig, hardware: Hardware, blocks: int) -> float:
    """Return the seconds in which Muon exchanges and orthogonalizes a rank's part of the matrices of blocks.

    The ranks of a pipeline stage divide the matrices among each other, and send them to and fro in 16 bits.
    While some are orthogonalized, others are on their way to their ranks.
    """
    if rule_of(config.optimizer).moments_in_blocks is None:
        return 0.0
    ranks = config.world_size // config.parallel.pp
    kind = "fp64" if config.precision.params == "fp64" else "bf16"
    seconds = size = 0.0
    for experts, rows, columns in _trained_matrices(config):
        short, long = sorted((rows, columns))
        products = ((short, short, long), (short, short, short), (short, long, short))
        each = sum(operations.product(hardware, kind, m, n, k) for m, n, k in products)
        seconds += experts * MUON_ITERATIONS * each / ranks
        size += experts * rows * columns * operations.WIDTH[kind] / ranks
    group = collectives.group(hardware, ranks, 1)
    exchange, seconds = collectives.all_to_all(hardware, group, blocks * size), blocks * seconds
    first = min(1.0, MUON_AT_ONCE * operations.WIDTH[kind] / (blocks * size or 1.0))
    return seconds + exchange + max(first * exchange, exchange - seconds)


def _trained_matrices(config: ResolvedConfig) -> Iterator[tuple[int, int, int]]:
    """Yield experts, rows and columns of the matrices of a block that a job trains: with LoRA the adapters."""
    table, rank = parameters.block(config.model), config.lora.rank
    if rank:
        for layer in adapted_layers(config.model, config.lora).values():
            outputs, inputs = table[f"{layer}.weight"].shape
            yield from ((1, rank, inputs), (1, outputs, rank))
        return
    for matrix in table.values():
        if not matrix.is_vector:
            experts, rows, columns = (1, *matrix.shape)[-3:]
            yield experts, rows, columns


def update(
    config: ResolvedConfig,
    hardware: Hardware,
    parameters: float,
    blocks: int,
    software: Software = NANOSCALE,
) -> float:
    """Return the seconds of clipping and of the optimizer on a rank.

    The device's memory bounds them, or with DTensors the host, which starts `_PER_TENSOR` operations for every
    tensor. Clipping reads the gradients for their norm, then reads and writes them.
    """
    passes = rule_of(config.optimizer).passes
    if rounds(config.optimizer, config.precision):
        passes = _ROUNDED[config.precision.params]
    if config.optimizer.clip_norm is not None:
        passes += 3
    if config.optimizer.ema_decay is not None:
        passes += 3
    size = passes * operations.WIDTH[config.precision.params] * parameters
    if config.zero.offload_optimizer == "none":
        seconds = operations.elementwise(hardware, size) + _orthogonalized(config, hardware, blocks)
        if not software.dtensor or config.world_size == 1:
            return seconds
        tensors = blocks * (len(linears(config.model, 1)) + 2)
        return max(seconds, _PER_TENSOR * DTENSOR_S * tensors)
    # The devices of a host share its memory. Gradients go to host memory, and parameters come back.
    bandwidth = hardware.host_memory_bandwidth / hardware.devices_per_host
    moved = 2.0 * operations.WIDTH[config.precision.compute] * parameters
    return size / bandwidth + moved / hardware.host_bandwidth
