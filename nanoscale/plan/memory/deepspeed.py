"""DeepSpeed's memory in addition to the model's activations: flat buffers, buckets, master weights, offloaded
tensors.

Source: deepspeed.runtime.zero (`stage_1_and_2`, `stage3`, `partitioned_param_coordinator`) as of 0.19:

* stages 1 and 2 keep one flat buffer of all weights in the compute dtype, and fp32 master weights of this
  rank's shard, even if the weights are fp32;
* stage 1 accumulates unsharded gradients, stage 2 this rank's shard. Both reduce gradients in a bucket of
  `reduce_bucket` elements, or in two buckets if communication overlaps;
* stage 3 always keeps this rank's shards of weights, master weights and gradients, and a bucket. A parameter
  stays gathered if it is used again within 10⁹ elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from nanoscale.common.units import byte_size, counted
from nanoscale.plan.memory.in_flight_activations import InFlightActivations, activations_at_peaks
from nanoscale.plan.memory.loss import LOGITS_AT_ONCE
from nanoscale.plan.memory.phases import MemoryEvent, Phase, RankPhases, phases_of
from nanoscale.plan.memory.setting import MemorySetting
from nanoscale.plan.memory.shards import RankParameters

REUSED_WITHIN = 10**9
"""Elements: DeepSpeed's stage3_max_reuse_distance and stage3_max_live_parameters."""
ALL_REDUCED = 5 * 10**8
"""Elements that stage 0 copies into one buffer to reduce them."""


def deepspeed_phases(
    setting: MemorySetting, params: RankParameters, in_flight: Sequence[int]
) -> RankPhases:
    (acts,) = activations_at_peaks(setting, params.stages, in_flight)
    share = -(-params.numel // setting.shards)
    make = {0: _stage_0, 3: _stage_3}.get(setting.stage, _stages_1_2)
    phases, host = make(setting, acts, params.numel, share, params.block)
    return RankPhases(
        phases=phases,
        pools=0,
        host=(("activations", acts.offloaded), ("optimizer and weights", host)),
        explain=partial(_explain, setting, params.numel, share),
    )


def phases_of_step(
    acts: InFlightActivations,
    static: tuple[int, int, int],
    gradients: tuple[int, int, int],
    units: int,
    buffers: int,
    step: int,
) -> tuple[Phase, ...]:
    """Return the phases of a step.

    Args:
        static: bytes of weights, of compute copies and of optimizer states.
        gradients: bytes before, during and after the backward pass.
        units: bytes of gathered parameters.
        step: bytes that the update allocates.
    """
    weights, copies, optimizer = static
    before, during, after = gradients
    start = {
        "weights": weights,
        "optimizer": optimizer,
        "compute_copies": copies,
        "gradients": before,
        "gathered": units,
        "activations": acts.activations,
        "communication": buffers + acts.boundaries,
    }
    last_block = {"activations": acts.activations - acts.ends}
    updated = {"activations": 0, "gathered": 0, "communication": acts.boundaries}
    return phases_of(
        start,
        (
            acts.loss_event(),
            MemoryEvent("backward of the last block", last_block, activations=acts.extra),
            MemoryEvent(
                "backward of the first block",
                {"gradients": during, "activations": acts.last},
                activations=acts.extra,
            ),
            MemoryEvent("end of the backward pass", {"gradients": after}),
            MemoryEvent("update", updated, gradients=step),
        ),
    )


def _stage_0(
    setting: MemorySetting, acts: InFlightActivations, numel: int, _share: int, _block: int
) -> tuple[tuple[Phase, ...], int]:
    """Return the phases of stage 0, and 0 bytes in host memory. Weights are cast to the compute dtype by
    autocast."""
    states = setting.states
    copies = setting.compute * numel if setting.run.autocast else 0
    gradients = int(states.gradients * numel)
    static = int(states.weights * numel), copies, int(states.optimizer * numel)
    bucket = int(states.gradients) * min(numel, ALL_REDUCED) if setting.peers > 1 else 0
    before = gradients if setting.micro_batches > 1 else 0
    return phases_of_step(acts, static, (before, before, gradients), 0, 0, bucket), 0


def _stages_1_2(
    setting: MemorySetting, acts: InFlightActivations, numel: int, share: int, block: int
) -> tuple[tuple[Phase, ...], int]:
    """Return the phases of stage 1 or 2, and the bytes in host memory."""
    config, states = setting.config, setting.states
    offloaded = config.zero.offload_optimizer != "none"
    unsharded, sharded = setting.reduce * numel, setting.reduce * share
    masters = int(states.weights * share)
    optimizer = int(states.optimizer * share)
    stage1 = setting.stage == 1
    accumulates = setting.micro_batches > 1
    before = (unsharded if stage1 else sharded) if accumulates else 0
    # If gradients are accumulated in the compute dtype, stage 2 has a second buffer for each micro batch.
    buffered = not stage1 and setting.reduce == setting.compute
    buffer = sharded if buffered and accumulates else 0
    after = unsharded if stage1 else sharded + buffer
    host = 0
    if offloaded:
        host = masters + optimizer + sharded + setting.compute * share
        masters = optimizer = 0
        # In the compute dtype gradients are accumulated on the host, otherwise on the device.
        if buffered:
            before = after = buffer = 0
    bucket = config.backend.reduce_bucket * (setting.reduce if stage1 else setting.compute)
    # "auto" overlaps in stage 3 alone
    buckets = bucket * (2 if config.backend.overlap_comm == "on" else 1)
    static = masters, setting.compute * numel, optimizer
    # The optimizer gets one flat copy of this rank's gradients.
    step = sharded if stage1 and not offloaded else 0
    return phases_of_step(acts, static, (before, before + buffer, after), 0, buckets, step), host


def _stage_3(
    setting: MemorySetting, acts: InFlightActivations, numel: int, share: int, block: int
) -> tuple[tuple[Phase, ...], int]:
    """Return the phases of stage 3, and the bytes in host memory."""
    config, states = setting.config, setting.states
    sharded = setting.reduce * share
    masters = int(states.weights * share)
    optimizer = int(states.optimizer * share)
    weights = setting.compute * share
    host = 0
    if config.zero.offload_optimizer != "none":
        host += masters + optimizer + sharded  # gradients have a buffer on the device too
        masters = optimizer = 0
    if config.zero.offload_param != "none":
        host += weights
        weights = 0
    if config.zero.hpz > 1:
        weights += setting.compute * -(-numel // config.zero.hpz)
    ahead = block + config.backend.prefetch_bucket
    reused = min(REUSED_WITHIN, REUSED_WITHIN // 2 + ahead)
    gathered = setting.compute * min(numel, max(ahead, reused))
    bucket = config.backend.reduce_bucket * setting.reduce
    static, gradients = (masters, weights, optimizer), (sharded, sharded, sharded)
    # The optimizer updates at most 10⁹ elements at a time, from a flat copy of their gradients.
    step = min(sharded, setting.reduce * REUSED_WITHIN) + bucket
    return phases_of_step(acts, static, gradients, gathered, bucket, step), host


def _explain(setting: MemorySetting, numel: int, share: int, name: str, phase: Phase) -> str:
    states, shape = setting.states, setting.shape
    bucket = setting.config.backend.reduce_bucket
    own = f"{share:,} of this rank (of {numel:,}, over {counted(setting.shards, 'rank')})"
    return {
        "weights": f"{states.weights:g} B · {own}: master weights, unless they are in host memory",
        "compute copies": f"{setting.compute} B · parameters in DeepSpeed's flat buffer: "
        + (own if setting.stage == 3 else f"{numel:,}"),
        "gradients": f"{setting.reduce} B · {numel:,} in stages 0 and 1; in stages 2 and 3 · {own}",
        "optimizer": f"{states.optimizer:g} B · {own}",
        "units in flight": f"{setting.compute} B · prefetched parameters, and parameters that are used "
        f"again within {REUSED_WITHIN:,} elements",
        "activations": f"as in the native backend, {shape.tokens:,} tokens a micro batch; at "
        f"'{phase.name}'",
        "logits and loss": f"{setting.vocabulary:,} · {shape.hidden:,} gradients of the head's weights, from "
        f"the forward pass on, and at most {LOGITS_AT_ONCE:,} logits at once",
        "communication buffers": f"buckets of {bucket:,} elements: {byte_size(phase.parts[name])}",
    }[name]
