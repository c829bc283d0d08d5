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
from nanoscale.config.layout import keeps_frozen_whole
from nanoscale.config.model_math import adapted_layers
from nanoscale.config.optimizers import MUON_ITERATIONS, rounds, rule_of
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
    device_share: float
    """The share of a gather's time in which the device copies (`collectives.device_share`)."""
    replica_share: float
    """The share of the all-reduce over replicas in which the device copies."""
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
    gather, reduce, all_reduce = _seconds(config, hardware, 1, size - experts)
    if experts:
        of_experts = _seconds(config, hardware, layout.data_ep, experts)
        gather, reduce = gather + of_experts[0], reduce + of_experts[1]
        all_reduce += of_experts[2]
    trained, whole = size, keeps_frozen_whole(config)
    if config.lora.rank:
        trained = sum(p.parameters for p in adapters(micro_batch_shape(config)))
        of_trained, reduce, all_reduce = _seconds(config, hardware, 1, trained)
        if whole:
            gather, size = of_trained, trained
    each_micro_batch = zero.stage == 3 and layout.pp == 1
    # One rank whose weights have the dtype of its products computes with the weights themselves.
    same_dtype = config.precision.compute == config.precision.params
    copied = 0 if software.distributed_optimizer or (peers == 1 and same_dtype) else 1
    return Plan(
        gather=gather,
        gather_backward=gather,
        reduce=reduce,
        all_reduce=all_reduce,
        gather_copies=copied * operations.elementwise(hardware, 2.0 * weight_bytes * size),
        reduce_copies=copied
        * operations.elementwise(hardware, (weight_bytes + grad_bytes) * trained),
        accumulate=operations.elementwise(hardware, (weight_bytes + 2 * grad_bytes) * trained),
        gathers=micro_batches if each_micro_batch else 1,
        gathers_backward=micro_batches if each_micro_batch else 0,
        reduces=micro_batches if zero.stage >= 2 and layout.pp == 1 else 1,
        overlapped=layout.pp == 1 or software.distributed_optimizer,
        after_update=0.0,
        device_share=collectives.device_share(hardware, _shard_ranks(config, hardware, 1)),
        replica_share=collectives.device_share(hardware, _replica_ranks(config, hardware, 1)),
        ends=not whole,
    )


def _seconds(
    config: ResolvedConfig, hardware: Hardware, ep: int, size: int
) -> tuple[float, float, float]:
    """Return the seconds to gather `size` parameters, to reduce-scatter their gradients and to sum the shards
    over replicas.

    The parameters are on every ep-th rank of data parallelism: ep = 1 for all but experts.
    """
    grad_bytes = operations.WIDTH[config.precision.reduce]
    shard, ranks = max(1, shards(config) // ep), _shard_ranks(config, hardware, ep)
    replicas = _replica_ranks(config, hardware, ep)
    return (
        collectives.all_gather(hardware, ranks, size * operations.WIDTH[config.precision.compute]),
        collectives.reduce_scatter(hardware, ranks, size * grad_bytes),
        collectives.all_reduce(hardware, replicas, size / shard * grad_bytes),
    )


def _shard_ranks(config: ResolvedConfig, hardware: Hardware, ep: int) -> collectives.AxisRanks:
    """Return the ranks that shard one copy of a parameter, if the parameter is on every ep-th rank."""
    return collectives.group(hardware, max(1, shards(config) // ep), config.parallel.tp * ep)


def _replica_ranks(config: ResolvedConfig, hardware: Hardware, ep: int) -> collectives.AxisRanks:
    """Return the ranks that have the same shard, one in each replica."""
    layout, shard = config.parallel, max(1, shards(config) // ep)
    replicas = layout.dp * layout.cp // ep // shard
    return collectives.group(hardware, replicas, layout.tp * ep * shard)


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
    gather = collectives.all_gather(hardware, ranks, size * sent_weight_bytes)
    backward = collectives.all_gather(hardware, secondary, size * sent_weight_bytes)
    reduce = collectives.reduce_scatter(hardware, ranks, size * sent_grad_bytes)
    overlap = backend.overlap_comm == "on" or (backend.overlap_comm == "auto" and stage3)
    copies = operations.elementwise(hardware, 2.0 * weight_bytes * size)
    return Plan(
        gather=gather if stage3 else 0.0,
        gather_backward=backward if stage3 else 0.0,
        reduce=reduce if zero.stage else 2 * reduce,
        all_reduce=0.0,
        gather_copies=copies if stage3 else 0.0,
        reduce_copies=operations.elementwise(hardware, (weight_bytes + grad_bytes) * size),
        accumulate=operations.elementwise(hardware, (weight_bytes + 2 * grad_bytes) * size),
        gathers=micro_batches if stage3 else 0,
        gathers_backward=micro_batches if stage3 else 0,
        reduces=micro_batches if zero.stage >= 2 else 1,
        overlapped=overlap and zero.stage > 0,
        after_update=gather if zero.stage in (1, 2) else 0.0,
        device_share=collectives.device_share(hardware, ranks),
        replica_share=0.0,
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

    def exposed(collective: float, computation: float, uncovered: float) -> float:
        """Return the exposed seconds of a collective for each block that overlaps with each block's
        computation.

        No computation overlaps with `uncovered` seconds for the first unit.
        """
        longer = max(0.0, collective - computation)
        return min(collective * units, uncovered * first_unit + longer * (blocks - 1))

    def exposed_backward(collective: float, uncovered: float) -> float:
        return exposed(collective, backward, uncovered) if plan.overlapped else collective * units

    # The first gather of a forward pass and the last reduction of a backward pass overlap with nothing.
    gather_and_reduce = min(plan.reduces, plan.gathers_backward)
    both = plan.gather_backward + plan.reduce
    passes = [
        (plan.gathers, plan.gather, exposed(plan.gather, forward, plan.gather)),
        (gather_and_reduce, both, exposed_backward(both, plan.reduce)),
        (
            plan.gathers_backward - gather_and_reduce,
            plan.gather_backward,
            exposed_backward(plan.gather_backward, 0.0),
        ),
        (plan.reduces - gather_and_reduce, plan.reduce, exposed_backward(plan.reduce, plan.reduce)),
    ]
    network = plan.after_update * units + sum(count * visible for count, _, visible in passes)
    hidden = sum(count * (collective * units - visible) for count, collective, visible in passes)
    slowdown = plan.device_share * hidden
    all_reduce = exposed_all_reduce = plan.all_reduce * units
    if plan.overlapped:
        # FSDP2 sums over replicas on a stream of its own, in parallel with the reductions within a replica.
        remaining = max(0.0, backward - plan.reduce)
        exposed_all_reduce = exposed(plan.all_reduce, remaining, plan.all_reduce)
    slowdown += plan.replica_share * (all_reduce - exposed_all_reduce)
    copies = plan.gather_copies * (plan.gathers + plan.gathers_backward)
    copies += plan.reduce_copies * plan.reduces
    if not shape.software.sums_in_products:
        copies += plan.accumulate * (micro_batches - plan.reduces)
    return network + exposed_all_reduce + hardware.efficiency.overlap * slowdown + copies * units


def _orthogonalized(config: ResolvedConfig, hardware: Hardware, blocks: int) -> float:
    """Return the seconds in which Muon exchanges and orthogonalizes a rank's part of the matrices of blocks.

    The ranks of a pipeline stage divide the matrices among each other, and send them to and fro in 16 bits.
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
    return blocks * seconds + 2 * collectives.all_to_all(hardware, group, blocks * size)


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
