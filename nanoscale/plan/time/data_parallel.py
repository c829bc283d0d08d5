"""The time of data parallelism on a rank in a step: gathers of parameters, reductions of gradients, copies.

A collective that runs in parallel with a block's computation costs the time by which it is longer, and a share
of the time in which the device both computes and copies (`Efficiency.overlap`). `parallel.fsdp` describes the
times of each for the native backend; DeepSpeed's stages are Rajbhandari et al. 2020, arXiv:1910.02054, sections
5 and 7.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from nanoscale.config.optimizers import rule_of
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.schema import Model
from nanoscale.plan.hardware.hardware import Hardware
from nanoscale.plan.hardware.software import DTENSOR_S, NANOSCALE, Software
from nanoscale.plan.memory.shards import RankParameters
from nanoscale.plan.time import collectives, operations
from nanoscale.plan.time.block import adapters, linears, slice_of
from nanoscale.plan.time.micro_batch_shape import MicroBatchShape

_PER_TENSOR = 3
"""Operations that the update starts for each tensor: its norm, its clipping, its optimizer."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The communication of the parameters and gradients of one unit (a block) in a layout, and its number in a
    step."""

    gather: float
    """Seconds for one block's parameters."""
    gather_again: float
    """The same in the backward pass, which may use a second, closer sharding."""
    reduce: float
    """Seconds for one block's gradients."""
    all_reduce: float
    """Seconds for the rest of the sum over replicas, once a step."""
    copies_gather: float
    """Seconds of the device's own memory traffic for a gather."""
    copies_reduce: float
    accumulate: float
    """The same to add a micro batch's gradients to those before."""
    gathers: int
    """Forward passes of a step that gather."""
    gathers_again: int
    """Backward passes of a step that gather."""
    reduces: int
    hidden: bool
    """True if gradients are communicated in parallel with the backward pass."""
    at_end: float
    """Seconds a block after the update, to gather the updated parameters."""
    device_share: float
    """The share of a collective's time in which the device copies (`collectives.device_share`)."""
    replica_share: float
    """The same for the sum over replicas."""


def shards(config: ResolvedConfig) -> int:
    """Return the ranks that share the optimizer states of a parameter."""
    layout = config.parallel
    if config.zero.stage == 0:
        return 1
    return layout.dp * layout.cp // layout.dp_replicate


@lru_cache(maxsize=1024)
def block_parameters(model: Model, tp: int, ep: int = 1) -> int:
    """Return the parameters of one block on a rank of tp that take time: without biases; the norms are
    whole."""
    return sum(p.parameters for p in linears(model, tp, ep)) + 2 * model.hidden


@lru_cache(maxsize=1024)
def expert_parameters(model: Model, tp: int, ep: int) -> int:
    """Return the experts' parameters among these."""
    return sum(p.parameters for p in linears(model, tp, ep)[5:]) if model.experts else 0


def rank_parameters(model: Model, tp: int, holding: RankParameters, ep: int = 1) -> int:
    """Return the parameters of a rank before ZeRO that take time; tied ends share one table."""
    table = model.vocab * model.hidden // tp
    both = holding.first and holding.last and model.tie_embeddings
    ends = 1 if both else holding.first + holding.last
    return holding.blocks * block_parameters(model, tp, ep) + ends * table


def own_parameters(config: ResolvedConfig, holding: RankParameters) -> float:
    """Return the parameters that a rank updates: ep ranks have different experts before ZeRO."""
    if holding.adapters is not None:
        return holding.adapters.shard
    model, layout, ranks = config.model, config.parallel, shards(config)
    experts = holding.blocks * expert_parameters(model, layout.tp, layout.ep)
    rest = rank_parameters(model, layout.tp, holding, layout.ep) - experts
    return rest / ranks + experts / max(1, ranks // layout.ep)


def plan(
    config: ResolvedConfig, hardware: Hardware, micro_batches: int, software: Software = NANOSCALE
) -> Plan:
    """Return the plan for a block of either backend."""
    layout, zero = config.parallel, config.zero
    wide, narrow = (
        operations.WIDTH[config.precision.compute],
        operations.WIDTH[config.precision.reduce],
    )
    size = block_parameters(config.model, layout.tp, layout.ep)
    copies = layout.dp * layout.cp
    if config.backend.name == "deepspeed":
        return _deepspeed(config, hardware, micro_batches, size, copies, wide, narrow)
    experts = expert_parameters(config.model, layout.tp, layout.ep)
    gather, reduce, all_reduce = _travel(config, hardware, 1, size - experts, wide, narrow)
    if experts:
        more = _travel(config, hardware, layout.ep, experts, wide, narrow)
        gather, reduce, all_reduce = gather + more[0], reduce + more[1], all_reduce + more[2]
    trained = size
    if config.lora.rank:
        trained = sum(p.parameters for p in adapters(slice_of(config)))
        _, reduce, all_reduce = _travel(config, hardware, 1, trained, wide, narrow)
    every = zero.stage == 3 and layout.pp == 1
    # One rank whose weights have the type of its products computes with the weights themselves.
    same_type = config.precision.compute == config.precision.params
    in_place = software.flat or (copies == 1 and same_type)
    return Plan(
        gather=gather,
        gather_again=gather,
        reduce=reduce,
        all_reduce=all_reduce,
        copies_gather=0.0 if in_place else operations.elementwise(hardware, 2.0 * wide * size),
        copies_reduce=0.0
        if in_place
        else operations.elementwise(hardware, (wide + narrow) * trained),
        accumulate=operations.elementwise(hardware, (wide + 2 * narrow) * trained),
        gathers=micro_batches if every else 1,
        gathers_again=micro_batches if every else 0,
        reduces=micro_batches if zero.stage >= 2 and layout.pp == 1 else 1,
        hidden=layout.pp == 1 or software.flat,
        at_end=0.0,
        device_share=collectives.device_share(hardware, _near(config, hardware, 1)),
        replica_share=collectives.device_share(hardware, _far(config, hardware, 1)),
    )


def _travel(
    config: ResolvedConfig, hardware: Hardware, ep: int, size: int, wide: int, narrow: int
) -> tuple[float, float, float]:
    """Return the seconds of a gather, of a reduction and of its remainder over replicas.

    `size` counts parameters that every ep-th rank of those with other tokens has.
    """
    shard = max(1, shards(config) // ep)
    near, far = _near(config, hardware, ep), _far(config, hardware, ep)
    return (
        collectives.all_gather(hardware, near, size * wide),
        collectives.reduce_scatter(hardware, near, size * narrow),
        collectives.all_reduce(hardware, far, size / shard * narrow),
    )


def _near(config: ResolvedConfig, hardware: Hardware, ep: int) -> collectives.AxisRanks:
    """Return the ranks that share the states of a parameter, of those that every ep-th rank has."""
    return collectives.group(hardware, max(1, shards(config) // ep), config.parallel.tp * ep)


def _far(config: ResolvedConfig, hardware: Hardware, ep: int) -> collectives.AxisRanks:
    """Return the ranks that have the same shard of these, one in each replica."""
    layout, shard = config.parallel, max(1, shards(config) // ep)
    replicas = layout.dp * layout.cp // ep // shard
    return collectives.group(hardware, replicas, layout.tp * ep * shard)


def _deepspeed(
    config: ResolvedConfig,
    hardware: Hardware,
    micro_batches: int,
    size: int,
    copies: int,
    wide: int,
    narrow: int,
) -> Plan:
    """Return DeepSpeed's plan: parameters stay in the compute dtype; gradients leave in buckets, in parallel
    with the backward pass if configured.

    Stages 1 and 2 gather the updated parameters after the update. Stage 3 gathers around each use, within
    `zero.hpz` ranks in the backward pass; ZeRO++ (Wang et al. 2023, arXiv:2306.10209) can gather in 8 bits and
    reduce gradients in 4.
    """
    layout, zero, backend = config.parallel, config.zero, config.backend
    everyone = collectives.group(hardware, copies, layout.tp)
    closer = collectives.group(hardware, zero.hpz, layout.tp) if zero.hpz > 1 else everyone
    third = zero.stage == 3
    travels = 1 if zero.quantized_weights else wide
    back = 0.5 if zero.quantized_gradients else narrow
    gather = collectives.all_gather(hardware, everyone, size * travels)
    reduce = collectives.reduce_scatter(hardware, everyone, size * back)
    overlap = backend.overlap_comm == "on" or (backend.overlap_comm == "auto" and third)
    return Plan(
        gather=gather if third else 0.0,
        gather_again=collectives.all_gather(hardware, closer, size * travels) if third else 0.0,
        reduce=reduce if zero.stage else 2 * reduce,
        all_reduce=0.0,
        copies_gather=operations.elementwise(hardware, 2.0 * wide * size) if third else 0.0,
        copies_reduce=operations.elementwise(hardware, (wide + narrow) * size),
        accumulate=operations.elementwise(hardware, (wide + 2 * narrow) * size),
        gathers=micro_batches if third else 0,
        gathers_again=micro_batches if third else 0,
        reduces=micro_batches if zero.stage >= 2 else 1,
        hidden=overlap and zero.stage > 0,
        at_end=gather if zero.stage in (1, 2) else 0.0,
        device_share=collectives.device_share(hardware, everyone),
        replica_share=0.0,
    )


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of a step on one rank."""

    exposed: float
    """Network time beside which nothing is computed."""
    slowdown: float
    """The time that computing loses to collectives beside it."""
    copies: float

    @property
    def total(self) -> float:
        return self.exposed + self.slowdown + self.copies


def cost(
    hardware: Hardware,
    part: MicroBatchShape,
    holding: RankParameters,
    plan: Plan,
    micro_batches: int,
    forward: float,
    backward: float,
) -> Cost:
    """Return the cost of a rank whose blocks take `forward` and `backward` seconds each for a micro batch."""
    blocks, overlap = holding.blocks, hardware.efficiency.overlap
    table = part.model.vocab * part.model.hidden / part.tp / _block(part)
    ends = table * (holding.first + holding.last)
    if part.model.tie_embeddings:
        ends = min(ends, table)
    units = blocks + ends
    exposed = hidden = slowdown = 0.0
    if plan.gathers:
        # The first unit has nothing to hide behind, the others have the block before them.
        first = plan.gather * (table if holding.first else 1)
        late = max(0.0, plan.gather - forward) * (blocks - 1)
        exposed += plan.gathers * (first + late)
        hidden += plan.gathers * max(0.0, plan.gather * units - first - late)
    both = min(plan.reduces, plan.gathers_again)
    for times, again, reduce in (
        (both, plan.gather_again, plan.reduce),
        (plan.gathers_again - both, plan.gather_again, 0.0),
        (plan.reduces - both, 0.0, plan.reduce),
    ):
        whole = (again + reduce) * units
        shown = whole
        if plan.hidden:
            # The last gradients leave when nothing is left to compute.
            shown = reduce * (table if holding.first else 1)
            shown += max(0.0, again + reduce - backward) * (blocks - 1)
            shown = min(shown, whole)
        exposed += times * shown
        hidden += times * (whole - shown)
    exposed += plan.at_end * units
    summed = plan.all_reduce * units
    if plan.hidden and summed:
        # FSDP2 sums over replicas on a stream of its own, in parallel with the reductions within a replica.
        spare = max(0.0, backward - plan.reduce)
        shown = plan.all_reduce * (table if holding.first else 1)
        shown = min(summed, shown + max(0.0, plan.all_reduce - spare) * (blocks - 1))
        slowdown += plan.replica_share * (summed - shown)
        summed = shown
    exposed += summed
    copies = plan.copies_gather * (plan.gathers + plan.gathers_again)
    copies += plan.copies_reduce * plan.reduces
    if not part.software.sums_in_products:
        copies += plan.accumulate * (micro_batches - plan.reduces)
    slowdown += plan.device_share * hidden
    return Cost(exposed, overlap * slowdown, copies * units)


def _block(part: MicroBatchShape) -> int:
    return block_parameters(part.model, part.tp, part.ep)


def update(
    config: ResolvedConfig,
    hardware: Hardware,
    parameters: float,
    blocks: int,
    software: Software = NANOSCALE,
) -> float:
    """Return the seconds of clipping and of the optimizer on a rank with so many parameters and blocks.

    They are bound by memory, or on DTensors by the host, which starts some operations for every tensor.

    Clipping reads the gradients for their norm, then reads and writes them.
    """
    wide = operations.WIDTH[config.precision.params]
    passes = rule_of(config.optimizer).passes
    if config.optimizer.clip_norm is not None:
        passes += 3
    if config.zero.offload_optimizer == "none":
        moved = operations.elementwise(hardware, passes * wide * parameters)
        if not software.dtensor or config.world_size == 1:
            return moved
        tensors = blocks * (len(linears(config.model, 1)) + 2)
        return max(moved, _PER_TENSOR * DTENSOR_S * tensors)
    # The devices of a host share its memory; gradients go down and parameters come up.
    share = hardware.host_memory_bandwidth / hardware.devices_per_host
    moved = 2.0 * operations.WIDTH[config.precision.compute] * parameters
    return passes * wide * parameters / share + moved / hardware.host_bandwidth
