"""The native backend's memory: FSDP2 in every stage of ZeRO, PyTorch's pipelines, our loss.

The memory of FSDP2 follows from torch.distributed.fsdp._fully_shard as of 2.13 (`_fsdp_param_group`,
`_fsdp_collectives`):

* * gathering a unit needs its whole parameters and, for a while, a flat buffer of the same size, which in the
  backward pass is the next unit's, prefetched;
* * a unit's gradients are copied into one buffer in the dtype of the reduction, which is held until the next
  unit's;
* * without sharding it gathers from itself: a copy of all weights in the compute dtype;
* * gradients that wait for the last micro batch are unsharded, in the dtype of the reduction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from nanoscale.common.units import byte_size
from nanoscale.config.layout import GRADIENT_BUCKET
from nanoscale.config.optimizers import rule_of
from nanoscale.plan.memory.activations import describe, stage_activations
from nanoscale.plan.memory.in_flight_activations import InFlightActivations, fly_all
from nanoscale.plan.memory.loss import LOGITS_AT_ONCE
from nanoscale.plan.memory.phases import Phase, RankPhases
from nanoscale.plan.memory.setting import MemorySetting
from nanoscale.plan.memory.shards import RankParameters

_QUANTIZING = 53
"""Bytes of each element at the peak of an update of 8-bit moments by single operations: fp32 copies of the
weights, of both moments and of the scaled one (16), its codes, the next and the rounded ones in 8 bytes each
(24), their values and the remainder (12), a comparison (1).

Source: torchao.optim.quant_utils, `quantize_8bit_with_qmap`."""


def native_phases(
    setting: MemorySetting, held: RankParameters, in_flight: Sequence[int]
) -> RankPhases:
    make = _single if setting.single else (_pipelined if setting.pp > 1 else _sharded)
    gathers = setting.compute * _gather_pool(setting, held)
    reductions = int(setting.states.gradients * held.trained.shard)
    reductions += setting.reduce * held.trained.block // setting.shards
    found = [(make(setting, held, fly), fly) for fly in fly_all(setting, held.stages, in_flight)]
    phases, fly = max(found, key=lambda one: max(phase.allocated for phase in one[0]))
    return RankPhases(
        phases=phases,
        pools=0 if setting.single else gathers + reductions,
        host=(("activations", fly.offloaded),),
        explain=partial(_explain, setting, held, fly),
    )


def _gather_pool(setting: MemorySetting, held: RankParameters) -> int:
    """Return the elements of two flat buffers of neighboring units."""
    if setting.shards == 1:
        return 0
    return held.block + max(held.block, held.head, held.embedding)


# --- phases ---------------------------------------------------------------------------------------


def _single(
    setting: MemorySetting, held: RankParameters, fly: InFlightActivations
) -> tuple[Phase, ...]:
    """Return the phases of one process: compute copies of all weights all the time, and fp32 gradients.

    With several processes that each have the whole model, gradients are copied into communication buckets.
    """
    states, trained = setting.states, held.trained
    # Frozen weights have no master.
    weights = int(states.weights * (trained if states.copy else held).numel)
    optimizer = int(states.optimizer * trained.numel)
    grads = int(states.gradients)
    before = grads * trained.numel if setting.micro_batches > 1 else 0
    product, head = setting.compute * _product(setting, trained), grads * trained.head
    copies = int(states.copy * held.numel)
    first = 0 if before else head
    # The last bucket ends with the whole embedding. Before the first block only full buckets are sent.
    bucket = min(GRADIENT_BUCKET + grads * trained.embedding, grads * trained.numel)
    done = grads * (trained.numel - trained.block - trained.embedding)
    full_bucket = GRADIENT_BUCKET if done > GRADIENT_BUCKET else 0
    if setting.peers == 1:
        bucket = full_bucket = 0
    phase = partial(Phase, weights=weights, optimizer=optimizer, compute_copies=copies)
    return (
        phase(
            "loss",
            gradients=before,
            activations=fly.activations,
            logits=fly.loss_kept + fly.loss,
            fragmented=fly.fragmented,
        ),
        phase(
            "backward of the last block",
            gradients=before + first + product,
            activations=fly.activations - fly.ends + fly.extra,
        ),
        phase(
            "backward of the first block",
            gradients=max(before, done) + product,
            activations=fly.last + fly.extra,
            communication=full_bucket,
        ),
        phase("end of the backward pass", gradients=grads * trained.numel, communication=bucket),
        _update(setting, held, phase(""), received=0),
    )


def _sharded(
    setting: MemorySetting, held: RankParameters, fly: InFlightActivations
) -> tuple[Phase, ...]:
    """Return the phases of FSDP2 without a pipeline: a unit's gradients are reduced when complete."""
    states, compute, reduce = setting.states, setting.compute, setting.reduce
    trained = held.trained
    weights, optimizer = int(states.weights * held.shard), int(states.optimizer * trained.shard)
    sharded = int(states.gradients * trained.shard)
    apart = setting.stage == 3
    copies = 0 if apart else compute * held.numel
    before = 0
    if setting.micro_batches > 1:
        before = sharded if setting.stage >= 2 else _waiting(setting) * trained.numel
    tied = setting.config.model.tie_embeddings
    head_sharded = int(states.gradients * trained.head_shard)
    head = head_sharded if not before else 0
    head += compute * trained.head if tied else 0
    gathered = compute * (2 * held.block + held.rest) if apart else 0
    ahead = compute * held.block if apart else 0
    needed = compute * (held.block + max(held.embedding, held.rest))
    # A step's last backward pass frees each unit's copy; with waiting gradients it is the only one that
    # reduces.
    several = setting.micro_batches > 1
    left = copies if several else min(copies, needed)
    sent_now = not several or setting.stage >= 2
    sent = reduce * trained.block if sent_now else 0
    reducing = _reducing(setting)
    # The first block is the last unit but the embedding to get its gradients; the block before is being
    # reduced.
    done = sharded * (trained.numel - trained.block - trained.embedding) // trained.numel
    # FSDP2 keeps the input of the embedding's reduction. A tied embedding stays gathered in addition to the
    # blocks.
    first_gathers = compute * (2 * held.embedding + (2 * held.block if tied else 0))
    phase = partial(Phase, weights=weights, optimizer=optimizer, compute_copies=copies)
    phase_at_end = partial(Phase, weights=weights, optimizer=optimizer, compute_copies=left)
    # From stage 2 on, gradients that wait were reduced on another stream.
    reduced_before = before if setting.stage >= 2 else 0
    reduced = max(before, done) if setting.stage >= 2 else 0
    with_head = before if setting.stage >= 2 else head
    phases = (
        phase(
            "loss",
            gradients=before,
            gathered=compute * held.head if apart else 0,
            activations=fly.activations,
            logits=fly.loss_kept + fly.loss,
            pooled=reduced_before,
            fragmented=fly.fragmented,
        ),
        phase(
            "reduction of the head",
            compute_copies=copies
            - (0 if apart or tied else _resharded_head(setting, held, before)),
            gradients=before
            + (0 if tied else head_sharded + (compute * trained.head if sent_now else 0)),
            gathered=ahead,
            activations=fly.activations,
            communication=0 if tied else reducing * trained.head,
            pooled=ahead + (before if setting.stage >= 2 else head_sharded),
        ),
        phase(
            "backward of the last block",
            gradients=before + head + compute * _product(setting, trained),
            gathered=gathered,
            activations=fly.activations - fly.ends + fly.extra,
            communication=0 if tied else reduce * trained.head,
            pooled=ahead + with_head,
        ),
        phase(
            "reduction of the last block",
            gradients=before + head + compute * trained.block,
            gathered=ahead,
            activations=max(0, fly.activations - fly.ends - fly.last),
            communication=reducing * trained.block,
            pooled=ahead + with_head,
        ),
        phase_at_end(
            "backward of the first block",
            gradients=max(before, done) + compute * _product(setting, trained),
            gathered=needed if apart else 0,
            activations=fly.last + fly.extra,
            communication=sent,
            pooled=reduced,
        ),
        phase_at_end(
            "backward of the embedding",
            # A tied table has two gradients, and their sum is a third.
            gradients=max(before, done) + compute * trained.embedding * (3 if tied else 1),
            gathered=needed if apart else 0,
            pooled=reduced,
        ),
        phase(
            "reduction of the embedding",
            compute_copies=copies if several and sent_now else 0,
            gradients=max(sharded, before) + compute * trained.embedding,
            communication=reducing * trained.embedding,
            pooled=sharded,
        ),
        _update(setting, held, Phase("", weights, optimizer), received=0),
    )
    if not (several and sent_now):
        return phases
    later = phase(
        "forward of a later micro batch",
        gradients=sharded,
        gathered=first_gathers if apart else 0,
        communication=reduce * trained.embedding,
        pooled=sharded,
    )
    return (*phases, later)


def _reducing(setting: MemorySetting) -> int:
    """Return the bytes of an element while its gradient is reduced: gloo reduces a copy of its input."""
    return setting.reduce if setting.gpu else 2 * setting.reduce


def _resharded_head(setting: MemorySetting, held: RankParameters, before: int) -> int:
    """Return the bytes of the head's gathered weights that the last backward pass frees before it reduces the
    head.

    The previous backward pass has all of them; in the first one there are no waiting gradients.
    """
    whole = setting.compute * held.head
    if setting.micro_batches == 1 or setting.stage < 2:
        return whole
    return min(before, whole) if setting.micro_batches == 2 else 0


def _pipelined(
    setting: MemorySetting, held: RankParameters, fly: InFlightActivations
) -> tuple[Phase, ...]:
    """Return the phases of FSDP2 in a pipeline: weights and gradients are unsharded from the first micro batch
    to the last, and reduced at the end."""
    states, compute, reduce = setting.states, setting.compute, setting.reduce
    reducing = _reducing(setting)
    trained = held.trained
    weights, optimizer = int(states.weights * held.shard), int(states.optimizer * trained.shard)
    copies = compute * held.numel
    waiting = _waiting(setting) * trained.numel
    sharded = int(states.gradients * trained.shard)
    deepest = max(fly.held)
    one = fly.activations // max(1, deepest)
    # If every micro batch is in flight before the first backward pass, there is no gradient yet.
    before = waiting if setting.micro_batches > deepest else 0
    phase = partial(
        Phase,
        weights=weights,
        optimizer=optimizer,
        compute_copies=copies,
        communication=fly.received,
    )
    phases = [
        phase(
            "loss",
            gradients=before,
            activations=fly.activations,
            logits=fly.loss_kept + fly.loss,
            fragmented=fly.fragmented,
        ),
        phase(
            "backward of the last block",
            gradients=before + compute * _product(setting, trained),
            activations=fly.activations - fly.ends + fly.extra,
            logits=fly.loss_kept - fly.gone,
        ),
        phase(
            "reduction",
            gradients=max(waiting, sharded) + reduce * trained.block // setting.shards,
            communication=fly.received
            + reducing * max(trained.block, trained.head, trained.embedding),
            pooled=sharded,
        ),
        _update(setting, held, Phase("", weights, optimizer), fly.received),
    ]
    if trained.embedding and setting.micro_batches > 1:
        # Of a later micro batch: its gradient of the whole table is added to the one that waits.
        phases.append(
            phase(
                "backward of the embedding",
                gradients=waiting + compute * trained.embedding,
                activations=max(0, fly.activations - (one if before else 2 * one)),
            )
        )
    if not before:
        phases.append(
            phase(
                "second micro batch's backward pass",
                gradients=waiting,
                activations=max(0, fly.activations - one - fly.ends) + fly.extra,
                logits=max(0, fly.loss_kept - fly.loss_kept // max(1, deepest) - fly.gone),
            )
        )
    return tuple(phases)


def _product(setting: MemorySetting, held: RankParameters) -> int:
    """Return the elements of a block's first gradient of weights.

    Experts that run one after another have none before the others (`moe.working_of_mixture`).
    """
    one_by_one = setting.shape.experts and not setting.run.grouped
    return 0 if one_by_one else held.largest_product


def _waiting(setting: MemorySetting) -> int:
    """Return the bytes of a whole gradient that waits for the last micro batch."""
    return setting.reduce if setting.reduce != setting.compute else setting.compute


def _update(setting: MemorySetting, held: RankParameters, before: Phase, received: int) -> Phase:
    """Return the phase of the update, whose temporary tensors are those of the largest parameter.

    The update of 8-bit AdamW is compiled on GPUs; on a CPU it consists of single operations on a matrix.
    """
    rule = rule_of(setting.config.optimizer)
    allocated = rule.copies * setting.states.weights
    if rule.quantized and not setting.gpu:
        allocated = _QUANTIZING
    gradients = int(setting.states.gradients * held.trained.shard)
    if setting.gpu and rule.decay_copies_gradients and setting.config.optimizer.weight_decay:
        gradients *= 2
    return replace(
        before,
        name="update",
        gradients=gradients,
        optimizer=before.optimizer + int(allocated * _largest_shard(setting, held)),
        communication=received,
        pooled=0 if setting.single else gradients,
    )


def _largest_shard(setting: MemorySetting, held: RankParameters) -> int:
    """Return the elements of the largest matrix that a rank updates."""
    units = [unit for stage in held.trained.stages for unit in stage.units]
    return max(
        -(-rows // setting.shards) * width for unit in units for rows, width in unit.matrices
    )


# --- explanations ---------------------------------------------------------------------------------


def _explain(
    setting: MemorySetting,
    held: RankParameters,
    fly: InFlightActivations,
    name: str,
    phase: Phase,
) -> str:
    states, shape = setting.states, setting.shape
    rank, trained = (
        f"{one.shard:,} parameters of this rank (of {one.numel:,}, over {setting.shards} ranks)"
        for one in (held, held.trained)
    )
    if name == "weights":
        return f"{states.weights:g} B · {rank}"
    if name == "optimizer":
        return f"{states.optimizer:g} B · {trained}; {setting.config.optimizer.name}'s states"
    if name == "compute copies":
        return (
            f"{setting.compute} B · {held.numel:,}: whole weights in the type of computation, "
            f"{'beside the fp32 master weights' if setting.single else 'by FSDP2'}"
        )
    if name == "gradients":
        return (
            f"{states.gradients:g} B · {trained} once reduced; {_waiting(setting)} B · {held.trained.numel:,} "
            f"while they wait whole; at '{phase.name}' with those of the unit being computed"
        )
    if name == "units in flight":
        return (
            f"{setting.compute} B · (2 · {held.block:,} of a block + {held.rest:,} of the root), or "
            f"the head's {held.head:,}"
        )
    if name == "activations":
        return _explain_activations(setting, held, fly)
    if name == "logits and loss":
        logits = (
            f"at most {LOGITS_AT_ONCE:,} logits at once in {setting.compute} B + {setting.loss} B"
        )
        if setting.config.lora.rank:
            return logits
        return (
            f"{setting.vocabulary:,} · {shape.hidden:,} gradients of the head's weights, from the forward "
            f"pass on, and {logits}"
        )
    if setting.single:
        return f"a bucket of gradients being reduced, of {byte_size(GRADIENT_BUCKET)} and one matrix at most"
    return (
        f"reductions {setting.reduce} B · {held.block:,} of a block or {held.head:,} of the head; "
        f"boundaries of the pipeline {byte_size(fly.received)}"
    )


def _explain_activations(
    setting: MemorySetting, held: RankParameters, fly: InFlightActivations
) -> str:
    counts = ", ".join(
        f"stage {stage.number}: {number} · {stage.layers} blocks"
        for stage, number in zip(held.stages, fly.held, strict=True)
    )
    block = stage_activations(1, setting.shape, setting.run, setting.config.parallel, setting.keep)
    return (
        f"micro batches in flight · their activations ({counts}; a block {byte_size(block.kept)}) = "
        f"{byte_size(fly.activations)}, and {byte_size(fly.extra)} while the highest one goes backward; "
        f"whole, a block saves {describe(setting.shape, setting.run)}"
    )
