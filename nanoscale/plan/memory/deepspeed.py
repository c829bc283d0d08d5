"""DeepSpeed's memory around our model: flat buffers, buckets, fp32 master weights and offloaded tensors.

It follows deepspeed.runtime.zero (`stage_1_and_2`, `stage3`, `partitioned_param_coordinator`) as of 0.19:

* * stages 1 and 2 keep one flat buffer of all weights in the compute dtype, and fp32 master weights of this
  rank's shard, also if the weights are fp32 themselves;
* * stage 1 sums whole gradients, stage 2 this rank's shard; both reduce through a bucket of `reduce_bucket`
  elements, or two buckets if communication overlaps;
* * stage 3 keeps its shards of weights, master weights and gradients and a bucket all the time, and keeps
  parameters gathered that are used again within 10⁹ elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from nanoscale.common.units import byte_size
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.plan.memory.in_flight_activations import InFlightActivations, fly_all
from nanoscale.plan.memory.loss import LOGITS_AT_ONCE
from nanoscale.plan.memory.phases import Phase, RankPhases
from nanoscale.plan.memory.setting import MemorySetting
from nanoscale.plan.memory.shards import RankParameters

REUSED_WITHIN = 10**9
"""Elements: DeepSpeed's stage3_max_reuse_distance and stage3_max_live_parameters."""
ALL_REDUCED = 5 * 10**8
"""Elements that stage 0 copies into one buffer to reduce them."""


def deepspeed_phases(
    setting: MemorySetting, held: RankParameters, in_flight: Sequence[int]
) -> RankPhases:
    (fly,) = fly_all(setting, held.stages, in_flight)
    share = -(-held.numel // setting.shards)
    make = {0: _replicated, 3: _taken_apart}.get(setting.stage, _flat)
    phases, host = make(setting, fly, held.numel, share, held.block)
    return RankPhases(
        phases=phases,
        pools=0,
        host=(("activations", fly.offloaded), ("optimizer and weights", host)),
        explain=partial(_explain, setting, held.numel, share),
    )


def _phases(
    fly: InFlightActivations,
    static: tuple[int, int, int],
    gradients: tuple[int, int, int],
    units: int,
    buffers: int,
    step: int,
) -> tuple[Phase, ...]:
    """Return the phases of a step.

    `static` holds weights, copies and states; `gradients` those before, in and after the backward pass; `step`
    the addition during the update.
    """
    weights, copies, optimizer = static
    before, during, after = gradients
    phase = partial(
        Phase,
        weights=weights,
        optimizer=optimizer,
        compute_copies=copies,
        gathered=units,
        communication=buffers + fly.received,
    )
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
            gradients=before,
            activations=fly.activations - fly.ends + fly.extra,
        ),
        phase("backward of the first block", gradients=during, activations=fly.last + fly.extra),
        phase("end of the backward pass", gradients=after, activations=fly.last),
        phase("update", gradients=after + step, gathered=0, communication=fly.received),
    )


def _replicated(
    setting: MemorySetting, fly: InFlightActivations, numel: int, _share: int, _block: int
) -> tuple[tuple[Phase, ...], int]:
    """Return stage 0: plain weights, gradients copied into buckets for reduction; autocast to the compute
    dtype."""
    states = setting.states
    copies = setting.compute * numel if setting.run.autocast else 0
    gradients = int(states.gradients * numel)
    static = int(states.weights * numel), copies, int(states.optimizer * numel)
    bucket = int(states.gradients) * min(numel, ALL_REDUCED) if setting.peers > 1 else 0
    before = gradients if setting.micro_batches > 1 else 0
    return _phases(fly, static, (before, before, gradients), 0, 0, bucket), 0


def _flat(
    setting: MemorySetting, fly: InFlightActivations, numel: int, share: int, block: int
) -> tuple[tuple[Phase, ...], int]:
    """Return stages 1 and 2."""
    config, states = setting.config, setting.states
    offloaded = config.zero.offload_optimizer != "none"
    waiting = setting.reduce
    whole = waiting * numel
    own = waiting * share
    masters = int(states.weights * share)
    optimizer = int(states.optimizer * share)
    first = setting.stage == 1
    several = setting.micro_batches > 1 or setting.keeps_gradients
    before = (whole if first else own) if several else 0
    # If sums have the width of the compute dtype, stage 2 has a separate buffer for every micro batch.
    apart = not first and waiting == setting.compute
    added = own if apart and several else 0
    after = whole if first else own + added
    host = 0
    if offloaded:
        host = masters + optimizer + own + setting.compute * share
        masters = optimizer = 0
        # else sums stay in the buffer of their reduction, and only the result goes to the host
        if apart:
            before = after = added = 0
    bucket = config.backend.reduce_bucket * (waiting if first else setting.compute)
    buckets = bucket * (2 if _overlaps(config) else 1)
    static = masters, setting.compute * numel, optimizer
    # The optimizer gets one flat copy of this rank's gradients.
    step = own if first and not offloaded and setting.copies_gradients else 0
    units = setting.compute * block if setting.placeholders else 0
    return _phases(fly, static, (before, before + added, after), units, buckets, step), host


def _taken_apart(
    setting: MemorySetting, fly: InFlightActivations, numel: int, share: int, block: int
) -> tuple[tuple[Phase, ...], int]:
    """Return stage 3."""
    config, states = setting.config, setting.states
    waiting = setting.reduce
    own = waiting * share
    masters = int(states.weights * share)
    optimizer = int(states.optimizer * share)
    weights = setting.compute * share
    host = 0
    if config.zero.offload_optimizer != "none":
        host += masters + optimizer + own  # the device keeps its gradient buffer too
        masters = optimizer = 0
    if config.zero.offload_param != "none":
        host += weights
        weights = 0
    if config.zero.hpz > 1:
        weights += setting.compute * -(-numel // config.zero.hpz)
    ahead = config.backend.prefetch_bucket
    live = min(numel, max(block + ahead, min(REUSED_WITHIN, REUSED_WITHIN // 2 + block + ahead)))
    bucket = config.backend.reduce_bucket * waiting
    static = masters, weights, optimizer
    # Sub-groups of at most 10⁹ elements are updated one at a time, each from a flat copy of its gradients.
    step = min(own, waiting * REUSED_WITHIN) + bucket
    phases = _phases(fly, static, (own, own, own), setting.compute * live, bucket, step)
    return phases, host


def _overlaps(config: ResolvedConfig) -> bool:
    asked = config.backend.overlap_comm
    return config.zero.stage == 3 if asked == "auto" else asked == "on"


def _explain(setting: MemorySetting, numel: int, share: int, name: str, phase: Phase) -> str:
    states, shape = setting.states, setting.shape
    bucket = setting.config.backend.reduce_bucket
    own = f"{share:,} of this rank (of {numel:,}, over {setting.shards} ranks)"
    return {
        "weights": f"{states.weights:g} B · {own}: updated states, unless they wait in host memory",
        "compute copies": f"{setting.compute} B · parameters in DeepSpeed's flat buffer: "
        + (own if setting.stage == 3 else f"{numel:,}"),
        "gradients": f"{setting.reduce} B · {numel:,} in stages 0 and 1, above · {own}",
        "optimizer": f"{states.optimizer:g} B · {own}",
        "units in flight": f"{setting.compute} B · parameters that are used again within "
        f"{REUSED_WITHIN:,}, and prefetched ones",
        "activations": f"as in the native backend, {shape.tokens:,} tokens a micro batch; at "
        f"'{phase.name}'",
        "logits and loss": f"{setting.vocabulary:,} · {shape.hidden:,} gradients of the head's weights, from "
        f"the forward pass on, and at most {LOGITS_AT_ONCE:,} logits at once",
        "communication buffers": f"buckets of {bucket:,} elements: {byte_size(phase.communication)}",
    }[name]
