"""The native backend's memory: FSDP2 in every stage of ZeRO, PyTorch's pipelines, our loss.

The memory of FSDP2 follows from torch.distributed.fsdp._fully_shard as of 2.13 (`_fsdp_param_group`,
`_fsdp_collectives`). A unit is a module whose parameters are gathered together:

* a gather needs the unit's unsharded parameters and a flat buffer of the same size. In the backward pass the
  buffer belongs to the next unit, which is prefetched;
* a unit's gradients are copied into one buffer in the dtype of the reduction. FSDP2 keeps the buffer until the
  next unit's reduction;
* without sharding there is a copy of all weights in the compute dtype;
* gradients that wait for the last micro batch are unsharded, in the dtype of the reduction.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from nanoscale.common.units import byte_size, counted
from nanoscale.config import parameters
from nanoscale.config.layout import GRADIENT_BUCKET, keeps_frozen_whole, keeps_narrow_experts
from nanoscale.config.optimizers import MUON_AT_ONCE, ROUNDED_AT_ONCE, rounds, rule_of
from nanoscale.plan.memory.activations import describe, stage_activations
from nanoscale.plan.memory.block_shape import Sizes
from nanoscale.plan.memory.in_flight_activations import InFlightActivations, activations_at_peaks
from nanoscale.plan.memory.loss import LOGITS_AT_ONCE
from nanoscale.plan.memory.phases import MemoryEvent, Phase, RankPhases, phases_of
from nanoscale.plan.memory.setting import MemorySetting
from nanoscale.plan.memory.shards import RankParameters

NF4 = 0.5 + 1 / 64
"""Bytes of a weight in 4 bits, with an 8-bit scale of 64 of them; the scales' own are left out."""
_ALONE, _EXCHANGED = 2.0, 5.5
"""The memory of an update of Muon for the shard of a matrix, in halves of a weight's width: directions and
updates in one process; with several, also whole matrices on their way between the ranks."""
_ROUNDED = {"fp32": 18, "bf16": 26}
"""Bytes of each element at the peak of a stochastically rounded update: both moments in fp32 (8), random
numbers (4), a sum and its rounded value (6), and with bf16 weights also weights and gradient in fp32 (8)."""
_QUANTIZING = 53
"""Bytes of each element at the peak of an update of 8-bit moments that is not compiled: fp32 copies of the
weights, of both moments and of the scaled moment (16); three int64 tensors of codes (24); the two neighboring
values and the remainder in fp32 (12); a comparison (1).

Source: torchao.optim.quant_utils, `quantize_8bit_with_qmap`."""


def native_phases(
    setting: MemorySetting, params: RankParameters, in_flight: Sequence[int]
) -> RankPhases:
    make = _single if setting.single else (_pipelined if setting.pp > 1 else _sharded)
    host, offloads = 0, setting.config.offloads and setting.gpu
    if offloads:
        host, setting = _in_host_memory(setting, params)
    gathered, whole = params, 0
    if not setting.single and keeps_frozen_whole(setting.config):
        gathered = params.trained
        whole = setting.compute * (params.numel - gathered.numel)
    kept = 2 * params.experts * keeps_narrow_experts(setting.config)
    if narrow := setting.narrow_weights:  # they count as fewer weights in the compute dtype
        saved = narrow - narrow // setting.compute
        numel, block = params.numel - params.blocks * saved, params.block - saved
        gathered = replace(params, numel=numel, block=block, adapters=params.trained)
    # the flat buffers of a block and of the unit that is prefetched
    buffers = gathered.block + max(gathered.block, gathered.head, gathered.embedding)
    gathers = setting.compute * buffers if setting.shards > 1 else 0
    reductions = int(setting.states.gradients * params.trained.shard)
    reductions += setting.reduce * params.trained.block // setting.shards
    moments = []
    for acts in activations_at_peaks(setting, params.stages, in_flight):
        start, events = make(setting, gathered, acts)
        start["weights"] += whole + kept
        if offloads or setting.config.lora.base == "nf4":
            events = [_added(setting, params.blocks, it) for it in events]
        moments.append((phases_of(start, events), acts))
    phases, acts = max(moments, key=lambda moment: max(phase.allocated for phase in moment[0]))
    return RankPhases(
        phases=phases,
        pools=0 if setting.single else gathers + reductions,
        host=(("activations", acts.offloaded), ("optimizer and weights", host)),
        explain=partial(_explain, setting, params, acts),
    )


def _in_host_memory(setting: MemorySetting, params: RankParameters) -> tuple[int, MemorySetting]:
    """Return the bytes that FSDP2 keeps on the host if it offloads, and the device's setting without them."""
    states, trained = setting.states, params.trained
    sharded = _sharded_weights(setting, params) + int(states.gradients * trained.shard)
    host = sharded + states.moments(trained.shard, trained.in_blocks_shard)
    if setting.micro_batches > 1:  # a unit's gradients before they are added to the sum
        unit = max(trained.block, trained.embedding, trained.head)
        host += int(states.gradients * unit) // setting.shards
    nothing = replace(states, weights=0, gradients=0, optimizer=0, in_blocks=0, frozen=0)
    return host, replace(setting, states=nothing)


def _added(setting: MemorySetting, blocks: int, it: MemoryEvent) -> MemoryEvent:
    """Return the event with what offloading and 4-bit weights add to it.

    The result of an offloaded reduction is on the device until it is copied. The blocks' matrices in 4 bits are
    whole on every rank, and the largest is in the compute dtype while a block's backward pass multiplies with
    it.
    """
    during = Counter(it.during)
    if setting.config.offloads and setting.gpu and it.name.startswith("reduction"):
        during["gradients"] += it.during.get("communication", 0) // setting.shards
    if setting.config.lora.base == "nf4":
        table = parameters.block(setting.config.model).values()
        sizes = [matrix.numel for matrix in table if not matrix.is_vector]
        during["weights"] += int(NF4 * blocks * sum(sizes))
        if "activations" in it.during:  # the backward pass of a block
            during["gathered"] += setting.compute * max(sizes)
    return MemoryEvent(it.name, it.levels, pooled=it.pooled, **during)


# --- events ---------------------------------------------------------------------------------------


Events = tuple[Sizes, list[MemoryEvent]]
"""The sizes of the parts before the first event, and the events of a step."""


def _single(setting: MemorySetting, params: RankParameters, acts: InFlightActivations) -> Events:
    """Return the events of a process that has the whole model: compute copies of all weights, and fp32
    gradients.

    With several such processes, gradients are copied into communication buckets.
    """
    states, trained = setting.states, params.trained
    grads = int(states.gradients)
    before = grads * trained.numel if setting.micro_batches > 1 else 0
    product = setting.compute * _product(setting, trained)
    # The last bucket includes the whole embedding. Until the first block only full buckets are reduced.
    bucket = min(GRADIENT_BUCKET + grads * trained.embedding, grads * trained.numel)
    computed = grads * (trained.numel - trained.block - trained.embedding)
    full_bucket = GRADIENT_BUCKET if computed > GRADIENT_BUCKET else 0
    if setting.peers == 1:
        bucket = full_bucket = 0
    start = {
        # Frozen weights have no fp32 master weights.
        "weights": int(states.weights * (trained if states.copy else params).numel),
        "optimizer": states.moments(trained.numel, trained.in_blocks),
        "compute_copies": int(states.copy * params.numel),
        "gradients": before,
        "activations": acts.activations,
    }
    after_head = {
        "gradients": before or grads * trained.head,
        "activations": acts.activations - acts.ends,
    }
    first_block = {"gradients": max(before, computed), "activations": acts.last}
    complete = {"gradients": grads * trained.numel, "activations": 0}
    working = {"gradients": product, "activations": acts.extra}
    return start, [
        acts.loss_event(),
        MemoryEvent("backward of the last block", after_head, **working),
        MemoryEvent(
            "backward of the first block", first_block, **working, communication=full_bucket
        ),
        MemoryEvent("end of the backward pass", complete, communication=bucket),
        _update(setting, params),
    ]


class _Sharding(NamedTuple):
    """FSDP2's communication in a step without a pipeline."""

    several: bool
    """True if a step has several micro batches."""
    gathers: bool
    """True if every pass gathers parameters: ZeRO stage 3. Otherwise there is a copy of all weights."""
    reduces_each: bool
    """True if every micro batch reduces gradients, not only the last."""
    sharded: int
    """Bytes of the reduced gradients of this rank."""
    before: int
    """Bytes of gradients before the last backward pass."""


def _sharded(setting: MemorySetting, params: RankParameters, acts: InFlightActivations) -> Events:
    """Return the events of FSDP2 without a pipeline: a unit's gradients are reduced when they are complete."""
    several, stage2, gathers = setting.micro_batches > 1, setting.stage >= 2, setting.stage == 3
    sharded = int(setting.states.gradients * params.trained.shard)
    before = several * (sharded if stage2 else setting.accumulated * params.trained.numel)
    how = _Sharding(several, gathers, not several or stage2, sharded, before)
    start = _sharded_start(setting, params, acts) | {"gradients": before}
    if gathers:
        start["compute_copies"] = 0
    last_units = _last_units(setting, params, acts, how)
    first_units = _first_units(setting, params, acts, how)
    return start, [*last_units, *first_units, _update(setting, params)]


def _last_units(
    setting: MemorySetting, params: RankParameters, acts: InFlightActivations, how: _Sharding
) -> Iterator[MemoryEvent]:
    """Yield the events of the loss, the head and the last blocks. A tied head is reduced at the end."""
    compute, reduce, trained, before = setting.compute, setting.reduce, params.trained, how.before
    tied, gathers, reducing = setting.config.model.tie_embeddings, how.gathers, _reducing(setting)
    depth = min(setting.config.zero.prefetch, max(1, params.blocks - 1))
    depth = depth if setting.shards > 1 else 0  # a single rank gathers nothing ahead
    prefetched = compute * depth * params.block * gathers
    block_units = compute * ((1 + depth) * params.block + params.rest) * gathers
    head_sharded = int(setting.states.gradients * trained.head_shard)
    untied_head = 0 if tied else trained.head
    head = (0 if before else head_sharded) + compute * (trained.head - untied_head)
    product = compute * _product(setting, trained)
    # Reduced gradients were allocated on the stream of reductions; gradients that wait in stage 1 were not.
    reduces_early = setting.stage >= 2
    pooled = prefetched + (before if reduces_early else head)
    yield acts.loss_event(before * how.reduces_each, gathered=compute * params.head * gathers)
    yield MemoryEvent(
        "reduction of the head",
        compute_copies=0 if gathers or tied else -_resharded_head(setting, params, before),
        gradients=0 if tied else head_sharded + compute * trained.head * how.reduces_each,
        gathered=prefetched,
        communication=reducing * untied_head,
        pooled=prefetched + (before if reduces_early else head_sharded),
    )
    yield MemoryEvent(
        "backward of the last block",
        {"gradients": before + head, "activations": acts.activations - acts.ends},
        gradients=product,
        activations=acts.extra,
        gathered=block_units,
        communication=reduce * untied_head,
        pooled=pooled,
    )
    yield MemoryEvent(
        "reduction of the last block",
        {"activations": max(0, acts.activations - acts.ends - acts.last)},
        gradients=compute * trained.block,
        gathered=prefetched,
        communication=reducing * trained.block,
        pooled=pooled,
    )
    if params.blocks > 2 and how.reduces_each and setting.shards > 1:
        # The last block is reduced during this backward pass, as the head during the last block's. Blocks with
        # experts are often larger than the head.
        freed = compute * (params.block + (0 if tied else params.head))
        reduced_block = int(setting.states.gradients * -(-trained.block // setting.shards))
        reduced_block = 0 if before else reduced_block
        yield MemoryEvent(
            "backward of the second last block",
            compute_copies=0 if how.several or gathers else -freed,
            gradients=reduced_block + product,
            activations=acts.extra,
            gathered=block_units,
            communication=reduce * trained.block,
            pooled=pooled + reduced_block,
        )


def _first_units(
    setting: MemorySetting, params: RankParameters, acts: InFlightActivations, how: _Sharding
) -> Iterator[MemoryEvent]:
    """Yield the events of the first block and the embedding, and of the next micro batch's forward pass."""
    compute, reduce, trained, sharded = setting.compute, setting.reduce, params.trained, how.sharded
    tied, copies = setting.config.model.tie_embeddings, compute * params.numel * (not how.gathers)
    last_units = compute * (params.block + max(params.embedding, params.rest))
    # Only the embedding has no gradient yet, and the second block's gradients are being reduced.
    reduced = sharded * (trained.numel - trained.block - trained.embedding) // trained.numel
    accumulated = max(how.before, reduced)
    pooled = accumulated * how.reduces_each
    yield MemoryEvent(
        "backward of the first block",
        {
            # A step's last backward pass frees the compute copy of each unit after the unit's gradients.
            "compute_copies": copies if how.several else min(copies, last_units),
            "gradients": accumulated,
            "gathered": last_units * how.gathers,
            "activations": acts.last,
        },
        gradients=compute * _product(setting, trained),
        activations=acts.extra,
        communication=reduce * trained.block * how.reduces_each,
        pooled=pooled,
    )
    # A tied table has two gradients and their sum.
    of_embedding = compute * trained.embedding * (3 if tied else 1)
    no_blocks = {"activations": 0}
    yield MemoryEvent("backward of the embedding", no_blocks, gradients=of_embedding, pooled=pooled)
    is_repeated = how.several and how.reduces_each
    complete = {"compute_copies": copies * is_repeated, "gathered": 0}
    yield MemoryEvent(
        "reduction of the embedding",
        complete | {"gradients": max(sharded, how.before)},
        gradients=compute * trained.embedding,
        communication=_reducing(setting) * trained.embedding,
        pooled=sharded,
    )
    if is_repeated:
        # FSDP2 keeps the input of the embedding's reduction. A tied embedding stays gathered during the blocks.
        units = 2 * params.embedding + (2 * params.block if tied else 0)
        yield MemoryEvent(
            "forward of a later micro batch",
            gathered=compute * units * how.gathers,
            communication=reduce * trained.embedding,
            pooled=sharded,
        )


def _sharded_start(
    setting: MemorySetting, params: RankParameters, acts: InFlightActivations
) -> Sizes:
    """Return the sizes of the parts before FSDP2's first event, without gradients."""
    trained = params.trained
    return {
        "weights": _sharded_weights(setting, params),
        "optimizer": setting.states.moments(trained.shard, trained.in_blocks_shard),
        "compute_copies": setting.compute * params.numel,
        "activations": acts.activations,
        "communication": acts.boundaries,
    }


def _sharded_weights(setting: MemorySetting, params: RankParameters) -> int:
    """Return the bytes of the shards of all weights, trained and frozen."""
    states, trained = setting.states, params.trained.shard
    return int(states.weights * trained + states.frozen * (params.shard - trained))


def _reducing(setting: MemorySetting) -> int:
    """Return the bytes of one gradient element during its reduction. gloo, on CPUs, reduces a copy."""
    return setting.reduce if setting.gpu else 2 * setting.reduce


def _resharded_head(setting: MemorySetting, params: RankParameters, before: int) -> int:
    """Return the bytes of the head's gathered weights that are free when its reduction needs the most memory.

    The last backward pass of a step frees these weights before the reduction. All earlier backward passes keep
    them, and the first pass has no waiting gradients.
    """
    head = setting.compute * params.head
    if setting.micro_batches == 1 or setting.stage < 2:
        return head
    return min(before, head) if setting.micro_batches == 2 else 0


def _pipelined(setting: MemorySetting, params: RankParameters, acts: InFlightActivations) -> Events:
    """Return the events of FSDP2 in a pipeline.

    Weights and gradients are unsharded during all micro batches, and gradients are reduced after the last.
    """
    compute, reduce, trained = setting.compute, setting.reduce, params.trained
    waiting = setting.accumulated * trained.numel
    sharded = int(setting.states.gradients * trained.shard)
    most = max(1, *acts.micro_batches)
    per_micro_batch, kept_by_loss = acts.activations // most, acts.loss_kept
    # If all micro batches are in flight before the first backward pass, no gradients exist at the peak.
    before = waiting if setting.micro_batches > most else 0
    start = _sharded_start(setting, params, acts) | {"gradients": before}
    after_head = {
        "activations": acts.activations - acts.ends,
        "logits": kept_by_loss - acts.loss_freed,
    }
    product = compute * _product(setting, trained)
    events = [
        acts.loss_event(),
        MemoryEvent(
            "backward of the last block", after_head, gradients=product, activations=acts.extra
        ),
    ]
    if not before:
        second = {
            "gradients": waiting,
            "activations": max(0, acts.activations - per_micro_batch - acts.ends),
            "logits": max(0, kept_by_loss - kept_by_loss // most - acts.loss_freed),
        }
        name = "second micro batch's backward pass"
        events.append(MemoryEvent(name, second, activations=acts.extra))
    if trained.embedding and setting.micro_batches > 1:
        # A later micro batch's gradient of the whole table is added to the accumulated gradient.
        freed = per_micro_batch if before else 2 * per_micro_batch
        later = {"gradients": waiting, "activations": max(0, acts.activations - freed), "logits": 0}
        of_table = compute * trained.embedding
        events.append(MemoryEvent("backward of the embedding", later, gradients=of_table))
    reduction = MemoryEvent(
        "reduction",
        {"gradients": max(waiting, sharded), "activations": 0, "logits": 0},
        gradients=reduce * trained.block // setting.shards,
        communication=_reducing(setting) * max(trained.block, trained.head, trained.embedding),
        pooled=sharded,
    )
    return start, [*events, reduction, _update(setting, params)]


def _product(setting: MemorySetting, params: RankParameters) -> int:
    """Return the elements of the first weight gradient that a block's backward pass computes.

    `moe.moe_working_memory` counts the gradients of experts that are computed one after another.
    """
    separate_experts = setting.shape.model.experts and not setting.run.grouped
    return 0 if separate_experts else params.largest_product


def _update(setting: MemorySetting, params: RankParameters) -> MemoryEvent:
    """Return the event of the update. Its temporary tensors are as large as the largest parameter.

    The update of 8-bit AdamW is compiled on GPUs and consists of single operations on CPUs.
    """
    rule = rule_of(setting.config.optimizer)
    compiled = rule.compiled and setting.gpu
    allocated = 0.0 if compiled else rule.copies * setting.states.weights
    if rule.quantized and not setting.gpu:
        allocated = _QUANTIZING
    gradients = int(setting.states.gradients * params.trained.shard)
    temporary = int(allocated * _largest_shard(setting, params)) if allocated else 0
    if rounds(setting.config.optimizer, setting.config.precision):
        computed = 0 if setting.gpu else _ROUNDED[setting.config.precision.params]
        temporary = computed * min(_largest_shard(setting, params), ROUNDED_AT_ONCE)
    if rule.moments_in_blocks is not None:
        sharing = setting.config.world_size // setting.pp
        replicas = sharing // (setting.config.parallel.tp * setting.shards)
        # Of MUON_AT_ONCE elements, while the next ones are sent: each replica has the directions of both, what
        # it sends of both, and updates that arrive, once also in another order; an owner has whole matrices.
        held, at_once = (_ALONE, 4) if sharing == 1 else (_EXCHANGED, 6 * replicas + 3)
        elements = min(held * params.trained.in_blocks_shard, at_once * MUON_AT_ONCE)
        temporary = int(setting.states.weights / 2 * elements)
    levels = {"gradients": gradients, "activations": 0}
    if setting.single:
        return MemoryEvent("update", levels, optimizer=temporary)
    return MemoryEvent(
        "update", levels | {"compute_copies": 0}, optimizer=temporary, pooled=gradients
    )


def _largest_shard(setting: MemorySetting, params: RankParameters) -> int:
    """Return the elements of the largest matrix that a rank updates."""
    units = (unit for stage in params.trained.stages for unit in stage.units)
    matrices = (matrix for unit in units for matrix in unit.matrices)
    return max(-(-rows // setting.shards) * width for rows, width in matrices)


# --- explanations ---------------------------------------------------------------------------------


def _explain(
    setting: MemorySetting,
    params: RankParameters,
    acts: InFlightActivations,
    name: str,
    phase: Phase,
) -> str:
    states, shape = setting.states, setting.shape
    rank, trained = (
        f"{held.shard:,} parameters of this rank (of {held.numel:,}, over {counted(setting.shards, 'rank')})"
        for held in (params, params.trained)
    )
    quantized = f"; {NF4:.2g} B of a matrix in a block" if setting.config.lora.base == "nf4" else ""
    of_blocks = f" ({states.in_blocks:g} B of a matrix in a block)"
    moments = f"{states.optimizer:g} B{of_blocks * (states.in_blocks != states.optimizer)}"
    in_addition = "in addition to the fp32 master weights" if setting.single else "by FSDP2"
    kept = f"; 2 B · {params.experts:,} of experts, in 8 bits for both passes"
    kept *= keeps_narrow_experts(setting.config)
    head = (
        f"{setting.vocabulary:,} · {shape.hidden:,} gradients of the head's weights, from the forward "
        f"pass on, and "
    )
    widths = f"{setting.compute} B + {setting.loss} B"
    buffers = (
        f"reductions {setting.reduce} B · {params.block:,} of a block or {params.head:,} of the head; "
        f"boundaries of the pipeline {byte_size(acts.boundaries)}"
    )
    if setting.single:
        bucket = byte_size(GRADIENT_BUCKET)
        buffers = f"a bucket of gradients being reduced, at most {bucket} and one matrix"
    return {
        "weights": f"{states.weights:g} B · {rank}{quantized}{kept}",
        "optimizer": f"{moments} · {trained}; {setting.config.optimizer.name}'s states",
        "compute copies": f"{setting.compute} B · {params.numel:,}: unsharded weights in the compute "
        f"dtype, {in_addition}",
        "gradients": f"{states.gradients:g} B · {trained} after the reduction; {setting.accumulated} B · "
        f"{params.trained.numel:,} before it; at '{phase.name}' in addition the unit being computed",
        "units in flight": f"{setting.compute} B · (2 · {params.block:,} of a block + {params.rest:,} "
        f"of the root), or the head's {params.head:,}",
        "activations": _explain_activations(setting, params, acts),
        "logits and loss": f"{head * (setting.config.lora.rank == 0)}at most {LOGITS_AT_ONCE:,} logits "
        f"at once in {widths}",
        "communication buffers": buffers,
    }[name]


def _explain_activations(
    setting: MemorySetting, params: RankParameters, acts: InFlightActivations
) -> str:
    counts = ", ".join(
        f"stage {stage.number}: {number} · {stage.layers} blocks"
        for stage, number in zip(params.stages, acts.micro_batches, strict=True)
    )
    block = stage_activations(1, setting.shape, setting.run, setting.config.parallel)
    return (
        f"micro batches in flight · their activations ({counts}; a block {byte_size(block.kept)}) = "
        f"{byte_size(acts.activations)}, and {byte_size(acts.extra)} during a block's backward pass; "
        f"without recomputation a block saves {describe(setting.shape, setting.run)}"
    )
