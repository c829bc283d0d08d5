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

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from nanoscale.common.units import byte_size
from nanoscale.config import parameters
from nanoscale.config.layout import GRADIENT_BUCKET
from nanoscale.config.optimizers import ROUNDED_AT_ONCE, rounds, rule_of
from nanoscale.plan.memory.activations import describe, stage_activations
from nanoscale.plan.memory.in_flight_activations import InFlightActivations, activations_at_peaks
from nanoscale.plan.memory.loss import LOGITS_AT_ONCE
from nanoscale.plan.memory.phases import Phase, RankPhases
from nanoscale.plan.memory.setting import MemorySetting
from nanoscale.plan.memory.shards import RankParameters

NF4 = 0.5 + 1 / 64
"""Bytes of a weight in 4 bits, with an 8-bit scale of 64 of them; the scales' own are left out."""
_BACKWARD_OF_BLOCKS = (
    "backward of the last block", "backward of the second last block", "backward of the first block",
    "second micro batch's backward pass",
)  # fmt: skip
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
    # the flat buffers of a block and of the unit that is prefetched
    buffers = params.block + max(params.block, params.head, params.embedding)
    gathers = setting.compute * buffers if setting.shards > 1 else 0
    reductions = int(setting.states.gradients * params.trained.shard)
    reductions += setting.reduce * params.trained.block // setting.shards
    moments = activations_at_peaks(setting, params.stages, in_flight)
    phases, acts = max(
        ((make(setting, params, acts), acts) for acts in moments),
        key=lambda moment: max(phase.allocated for phase in moment[0]),
    )
    if offloads:
        phases = tuple(_with_reduced(phase, setting) for phase in phases)
    if setting.config.lora.base == "nf4":
        phases = tuple(_with_quantized(phase, setting, params.blocks) for phase in phases)
    return RankPhases(
        phases=phases,
        pools=0 if setting.single else gathers + reductions,
        host=(("activations", acts.offloaded), ("optimizer and weights", host)),
        explain=partial(_explain, setting, params, acts),
    )


def _in_host_memory(setting: MemorySetting, params: RankParameters) -> tuple[int, MemorySetting]:
    """Return the bytes that FSDP2 keeps in host memory if it offloads, and the setting of the device without
    them."""
    states, trained = setting.states, params.trained
    sharded = states.weights * params.shard + states.gradients * trained.shard
    host = int(sharded) + states.moments(trained.shard, trained.in_blocks_shard)
    if setting.micro_batches > 1:  # a unit's gradients before they are added to those of others
        unit = max(trained.block, trained.embedding, trained.head)
        host += int(states.gradients * unit) // setting.shards
    nothing = replace(states, weights=0, gradients=0, optimizer=0, in_blocks=0)
    return host, replace(setting, states=nothing)


def _with_quantized(phase: Phase, setting: MemorySetting, blocks: int) -> Phase:
    """Return the phase with the blocks' matrices in 4 bits, which every rank has whole, and with the largest
    of them in the compute dtype while a block's backward pass multiplies with it."""
    sizes = [it.numel for it in parameters.block(setting.config.model).values() if not it.is_vector]
    multiplies = phase.name in _BACKWARD_OF_BLOCKS
    return replace(
        phase,
        weights=phase.weights + int(NF4 * blocks * sum(sizes)),
        gathered=phase.gathered + setting.compute * max(sizes) * multiplies,
    )


def _with_reduced(phase: Phase, setting: MemorySetting) -> Phase:
    """Return the phase with the result of its reduction, which is on the device until it is copied."""
    result = phase.communication // setting.shards if phase.name.startswith("reduction") else 0
    return replace(phase, gradients=phase.gradients + result)


# --- phases ---------------------------------------------------------------------------------------


def _single(
    setting: MemorySetting, params: RankParameters, acts: InFlightActivations
) -> tuple[Phase, ...]:
    """Return the phases of a process that has the whole model: compute copies of all weights, and fp32
    gradients.

    With several such processes, gradients are copied into communication buckets.
    """
    states, trained = setting.states, params.trained
    # Frozen weights have no fp32 master weights.
    weights = int(states.weights * (trained if states.copy else params).numel)
    optimizer = states.moments(trained.numel, trained.in_blocks)
    grads = int(states.gradients)
    before = grads * trained.numel if setting.micro_batches > 1 else 0
    product, head = setting.compute * _product(setting, trained), grads * trained.head
    copies = int(states.copy * params.numel)
    new_head = 0 if before else head
    # The last bucket includes the whole embedding. Until the first block only full buckets are reduced.
    bucket = min(GRADIENT_BUCKET + grads * trained.embedding, grads * trained.numel)
    computed = grads * (trained.numel - trained.block - trained.embedding)
    full_bucket = GRADIENT_BUCKET if computed > GRADIENT_BUCKET else 0
    if setting.peers == 1:
        bucket = full_bucket = 0
    phase = partial(Phase, weights=weights, optimizer=optimizer, compute_copies=copies)
    return (
        acts.loss_phase(phase, gradients=before),
        phase(
            "backward of the last block",
            gradients=before + new_head + product,
            activations=acts.activations - acts.ends + acts.extra,
        ),
        phase(
            "backward of the first block",
            gradients=max(before, computed) + product,
            activations=acts.last + acts.extra,
            communication=full_bucket,
        ),
        phase("end of the backward pass", gradients=grads * trained.numel, communication=bucket),
        _update(setting, params, phase(""), boundaries=0),
    )


def _sharded(
    setting: MemorySetting, params: RankParameters, acts: InFlightActivations
) -> tuple[Phase, ...]:
    """Return the phases of FSDP2 without a pipeline: a unit's gradients are reduced when they are complete."""
    states, compute, reduce = setting.states, setting.compute, setting.reduce
    trained, tied = params.trained, setting.config.model.tie_embeddings
    several, stage2 = setting.micro_batches > 1, setting.stage >= 2
    gathers = setting.stage == 3
    reduces_each = not several or stage2  # every micro batch, not only the last
    weights = int(states.weights * params.shard)
    optimizer = states.moments(trained.shard, trained.in_blocks_shard)
    sharded = int(states.gradients * trained.shard)
    before = 0
    if several:
        before = sharded if stage2 else reduce * trained.numel
    head_sharded = int(states.gradients * trained.head_shard)
    head = (0 if before else head_sharded) + (compute * trained.head if tied else 0)
    depth = min(setting.config.zero.prefetch, max(1, params.blocks - 1))
    depth = depth if setting.shards > 1 else 0  # a single rank gathers nothing ahead
    prefetched = compute * depth * params.block if gathers else 0
    last_units = compute * (params.block + max(params.embedding, params.rest))
    gathered_last = last_units if gathers else 0
    # A step's last backward pass frees the compute copy of each unit after the unit's gradients.
    copies = 0 if gathers else compute * params.numel
    remaining_copies = copies if several else min(copies, last_units)
    # During the first block's backward pass only the embedding has no gradient yet, and the second block's
    # gradients are being reduced.
    reduced = sharded * (trained.numel - trained.block - trained.embedding) // trained.numel
    accumulated = max(before, reduced)
    reducing = _reducing(setting)
    # Reduced gradients were allocated on the stream of reductions. Those that wait until stage 1 were not.
    pooled_before, pooled_accumulated = (before, accumulated) if reduces_each else (0, 0)
    pooled_last_block = prefetched + (before if stage2 else head)
    phase = partial(Phase, weights=weights, optimizer=optimizer, compute_copies=copies)
    final = partial(phase, compute_copies=remaining_copies)
    phases = [
        acts.loss_phase(
            phase,
            gradients=before,
            gathered=compute * params.head if gathers else 0,
            pooled=pooled_before,
        ),
        phase(
            "reduction of the head",
            compute_copies=copies
            - (0 if gathers or tied else _resharded_head(setting, params, before)),
            gradients=before
            + (0 if tied else head_sharded + (compute * trained.head if reduces_each else 0)),
            gathered=prefetched,
            activations=acts.activations,
            communication=0 if tied else reducing * trained.head,
            pooled=prefetched + (before if stage2 else head_sharded),
        ),
        phase(
            "backward of the last block",
            gradients=before + head + compute * _product(setting, trained),
            gathered=compute * ((1 + depth) * params.block + params.rest) if gathers else 0,
            activations=acts.activations - acts.ends + acts.extra,
            communication=0 if tied else reduce * trained.head,
            pooled=pooled_last_block,
        ),
        phase(
            "reduction of the last block",
            gradients=before + head + compute * trained.block,
            gathered=prefetched,
            activations=max(0, acts.activations - acts.ends - acts.last),
            communication=reducing * trained.block,
            pooled=pooled_last_block,
        ),
        final(
            "backward of the first block",
            gradients=accumulated + compute * _product(setting, trained),
            gathered=gathered_last,
            activations=acts.last + acts.extra,
            communication=reduce * trained.block if reduces_each else 0,
            pooled=pooled_accumulated,
        ),
        final(
            "backward of the embedding",
            # A tied table has two gradients and their sum.
            gradients=accumulated + compute * trained.embedding * (3 if tied else 1),
            gathered=gathered_last,
            pooled=pooled_accumulated,
        ),
        phase(
            "reduction of the embedding",
            compute_copies=copies if several and reduces_each else 0,
            gradients=max(sharded, before) + compute * trained.embedding,
            communication=reducing * trained.embedding,
            pooled=sharded,
        ),
        _update(setting, params, Phase("", weights, optimizer), boundaries=0),
    ]
    if params.blocks > 2 and reduces_each and setting.shards > 1:
        # The last block is reduced during this backward pass, as the head during the last block's. Blocks with
        # experts are often larger than the head.
        freed = 0 if several or gathers else compute * (params.block + (0 if tied else params.head))
        reduced_block = 0 if before else int(states.gradients * -(-trained.block // setting.shards))
        later_blocks = phase(
            "backward of the second last block",
            compute_copies=copies - freed,
            gradients=before + head + reduced_block + compute * _product(setting, trained),
            gathered=compute * ((1 + depth) * params.block + params.rest) if gathers else 0,
            activations=max(0, acts.activations - acts.ends - acts.last) + acts.extra,
            communication=reduce * trained.block,
            pooled=pooled_last_block + reduced_block,
        )
        phases.append(later_blocks)
    if several and reduces_each:
        # FSDP2 keeps the input of the embedding's reduction. A tied embedding stays gathered during the blocks.
        units = 2 * params.embedding + (2 * params.block if tied else 0)
        later = phase(
            "forward of a later micro batch",
            gradients=sharded,
            gathered=compute * units if gathers else 0,
            communication=reduce * trained.embedding,
            pooled=sharded,
        )
        phases.append(later)
    return tuple(phases)


def _reducing(setting: MemorySetting) -> int:
    """Return the bytes of one gradient element during its reduction. On CPUs, gloo reduces a copy of its
    input."""
    return setting.reduce if setting.gpu else 2 * setting.reduce


def _resharded_head(setting: MemorySetting, params: RankParameters, before: int) -> int:
    """Return the bytes of the head's gathered weights that are free at the highest reduction of the head.

    The last backward pass of a step frees these weights before the reduction. All earlier backward passes keep
    them, and the first pass has no waiting gradients.
    """
    head = setting.compute * params.head
    if setting.micro_batches == 1 or setting.stage < 2:
        return head
    return min(before, head) if setting.micro_batches == 2 else 0


def _pipelined(
    setting: MemorySetting, params: RankParameters, acts: InFlightActivations
) -> tuple[Phase, ...]:
    """Return the phases of FSDP2 in a pipeline.

    Weights and gradients are unsharded during all micro batches, and gradients are reduced after the last.
    """
    states, compute, reduce = setting.states, setting.compute, setting.reduce
    reducing = _reducing(setting)
    trained = params.trained
    weights = int(states.weights * params.shard)
    optimizer = states.moments(trained.shard, trained.in_blocks_shard)
    copies = compute * params.numel
    waiting = reduce * trained.numel
    sharded = int(states.gradients * trained.shard)
    most = max(acts.micro_batches)
    per_micro_batch = acts.activations // max(1, most)
    # If all micro batches are in flight before the first backward pass, no gradients exist at the peak.
    before = waiting if setting.micro_batches > most else 0
    phase = partial(
        Phase,
        weights=weights,
        optimizer=optimizer,
        compute_copies=copies,
        communication=acts.boundaries,
    )
    phases = [
        acts.loss_phase(phase, gradients=before),
        phase(
            "backward of the last block",
            gradients=before + compute * _product(setting, trained),
            activations=acts.activations - acts.ends + acts.extra,
            logits=acts.loss_kept - acts.loss_freed,
        ),
        phase(
            "reduction",
            gradients=max(waiting, sharded) + reduce * trained.block // setting.shards,
            communication=acts.boundaries
            + reducing * max(trained.block, trained.head, trained.embedding),
            pooled=sharded,
        ),
        _update(setting, params, Phase("", weights, optimizer), acts.boundaries),
    ]
    if trained.embedding and setting.micro_batches > 1:
        # A later micro batch's gradient of the whole table is added to the accumulated gradient.
        freed = per_micro_batch if before else 2 * per_micro_batch
        phases.append(
            phase(
                "backward of the embedding",
                gradients=waiting + compute * trained.embedding,
                activations=max(0, acts.activations - freed),
            )
        )
    if not before:
        phases.append(
            phase(
                "second micro batch's backward pass",
                gradients=waiting,
                activations=max(0, acts.activations - per_micro_batch - acts.ends) + acts.extra,
                logits=max(0, acts.loss_kept - acts.loss_kept // max(1, most) - acts.loss_freed),
            )
        )
    return tuple(phases)


def _product(setting: MemorySetting, params: RankParameters) -> int:
    """Return the elements of the first weight gradient that a block's backward pass computes.

    `moe.moe_working_memory` counts the gradients of experts that are computed one after another.
    """
    separate_experts = setting.shape.experts and not setting.run.grouped
    return 0 if separate_experts else params.largest_product


def _update(
    setting: MemorySetting, params: RankParameters, before: Phase, boundaries: int
) -> Phase:
    """Return the phase of the update. Its temporary tensors are as large as the largest parameter.

    The update of 8-bit AdamW is compiled on GPUs and consists of single operations on CPUs.
    """
    rule = rule_of(setting.config.optimizer)
    allocated = rule.copies * setting.states.weights
    if rule.quantized and not setting.gpu:
        allocated = _QUANTIZING
    gradients = int(setting.states.gradients * params.trained.shard)
    if setting.gpu and rule.decay_copies_gradients and setting.config.optimizer.weight_decay:
        gradients *= 2
    temporary = int(allocated * _largest_shard(setting, params)) if allocated else 0
    if rounds(setting.config.optimizer, setting.config.precision):
        computed = _ROUNDED[setting.config.precision.params]
        at_once = ROUNDED_AT_ONCE["cuda" if setting.gpu else "cpu"]
        temporary = computed * min(_largest_shard(setting, params), at_once)
    if rule.moments_in_blocks is not None:
        alone = setting.config.world_size == setting.pp
        held = setting.states.weights / 2 * (_ALONE if alone else _EXCHANGED)
        temporary = int(held * params.trained.in_blocks_shard)
    return Phase(
        "update",
        before.weights,
        before.optimizer + temporary,
        before.compute_copies,
        gradients,
        communication=boundaries,
        pooled=0 if setting.single else gradients,
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
        f"{held.shard:,} parameters of this rank (of {held.numel:,}, over {setting.shards} ranks)"
        for held in (params, params.trained)
    )
    if name == "weights":
        quantized = (
            f"; {NF4:.2g} B of a matrix in a block" if setting.config.lora.base == "nf4" else ""
        )
        return f"{states.weights:g} B · {rank}{quantized}"
    if name == "optimizer":
        each = f"{states.optimizer:g} B"
        if states.in_blocks != states.optimizer:
            each += f" ({states.in_blocks:g} B of a matrix in a block)"
        return f"{each} · {trained}; {setting.config.optimizer.name}'s states"
    if name == "compute copies":
        return (
            f"{setting.compute} B · {params.numel:,}: unsharded weights in the compute dtype, "
            f"{'in addition to the fp32 master weights' if setting.single else 'by FSDP2'}"
        )
    if name == "gradients":
        return (
            f"{states.gradients:g} B · {trained} after the reduction; {setting.reduce} B · "
            f"{params.trained.numel:,} before it; at '{phase.name}' in addition the unit being computed"
        )
    if name == "units in flight":
        return (
            f"{setting.compute} B · (2 · {params.block:,} of a block + {params.rest:,} of the root), or "
            f"the head's {params.head:,}"
        )
    if name == "activations":
        return _explain_activations(setting, params, acts)
    if name == "logits and loss":
        widths = f"{setting.compute} B + {setting.loss} B"
        logits = f"at most {LOGITS_AT_ONCE:,} logits at once in {widths}"
        if setting.config.lora.rank:
            return logits
        return (
            f"{setting.vocabulary:,} · {shape.hidden:,} gradients of the head's weights, from the forward "
            f"pass on, and {logits}"
        )
    if setting.single:
        return f"a bucket of gradients being reduced, at most {byte_size(GRADIENT_BUCKET)} and one matrix"
    return (
        f"reductions {setting.reduce} B · {params.block:,} of a block or {params.head:,} of the head; "
        f"boundaries of the pipeline {byte_size(acts.boundaries)}"
    )


def _explain_activations(
    setting: MemorySetting, params: RankParameters, acts: InFlightActivations
) -> str:
    counts = ", ".join(
        f"stage {stage.number}: {number} · {stage.layers} blocks"
        for stage, number in zip(params.stages, acts.micro_batches, strict=True)
    )
    block = stage_activations(1, setting.shape, setting.run, setting.config.parallel, setting.keep)
    return (
        f"micro batches in flight · their activations ({counts}; a block {byte_size(block.kept)}) = "
        f"{byte_size(acts.activations)}, and {byte_size(acts.extra)} during a block's backward pass; "
        f"without recomputation a block saves {describe(setting.shape, setting.run)}"
    )
