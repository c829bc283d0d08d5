"""The time of a step, by parts, and derived figures: tokens/s, utilization, the time and cost of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from operator import itemgetter

from nanoscale.config.model_math import (
    flops_per_token,
    flops_per_token_causal,
    trained_flops_per_token,
)
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.schema import Model
from nanoscale.plan.hardware.hardware import Hardware
from nanoscale.plan.hardware.software import NANOSCALE, Software
from nanoscale.plan.memory.shards import RankParameters, all_stages, kinds_of_ranks
from nanoscale.plan.pipeline import bubble
from nanoscale.plan.time import block as blocks
from nanoscale.plan.time import collectives, data_parallel, offload, operations
from nanoscale.plan.time.micro_batch_shape import NOTHING, MicroBatchShape, Passes, Work


@dataclass(frozen=True, slots=True)
class StepBreakdown:
    """Seconds of a step on the busiest pipeline rank; they add up to the step."""

    matmul: float
    attention: float
    elementwise: float
    recomputed: float
    """Recomputation for the backward pass."""
    launch: float
    """The device waits for the CPU to start kernels."""
    tp: float
    cp: float
    ep: float
    """The exchange of tokens with their experts."""
    pp: float
    """The transfer of activations and their gradients between stages."""
    dp: float
    """Exposed gathers and reductions, the slowdown by hidden ones, and their copies."""
    bubble: float
    optimizer: float
    offload: float
    data: float
    jitter: float
    """Waiting for the slowest host."""

    @property
    def seconds(self) -> float:
        """The sum of all parts."""
        seconds: float = sum(getattr(self, name) for name in _PARTS)
        return seconds


_PARTS = tuple(field.name for field in fields(StepBreakdown))


@dataclass(frozen=True, slots=True)
class StepTime:
    """A predicted step."""

    seconds: float
    parts: StepBreakdown
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    mfu: float
    """Model FLOPs over the peak, attention counted whole (PaLM, Chowdhery et al. 2022, appendix B)."""
    mfu_causal: float
    """The same with half of attention."""
    hfu: float
    """Mfu with recomputation."""


@dataclass(frozen=True, slots=True)
class StageCost:
    """Seconds of one micro batch in one stage, for simulating a schedule."""

    forward: float
    backward: float
    """The backward pass with recomputation."""
    weights: float
    """The share of the backward pass for the weights' gradients, for schedules that split it."""
    send: float
    """The transfer to the next stage, or back."""


@dataclass(frozen=True, slots=True)
class TrainingEstimate:
    """A whole run."""

    steps: int
    hours: float
    device_hours: float
    cost: float | None


def step_time(
    config: ResolvedConfig,
    hardware: Hardware,
    makespan: float | None = None,
    software: Software = NANOSCALE,
) -> StepTime:
    """Predict a step of a configuration that `rules.check` has resolved.

    Args:
        makespan: seconds of the pipeline's part of the step, if it was simulated; None: in closed form.
    """
    layout = config.parallel
    part = blocks.slice_of(config, software)
    one, ends = blocks.block(hardware, part), _ends(hardware, part)
    share, count = blocks.recomputed_share(config), config.accumulation
    forward = one.seconds[0]
    backward = one.seconds[1] + share * one.seconds[2]
    shards = data_parallel.shards(config)
    kinds = kinds_of_ranks(config, shards)
    loads = [(_load(held, forward + backward, ends), held) for held in kinds]
    load, holding = max(loads, key=itemgetter(0))
    busy = _busy(holding, one, ends)
    idle, late = _waiting(config, hardware, part, one, ends)
    if makespan is not None:
        waits = max(0.0, makespan - count * load)
        late = min(late, waits)
        idle = waits - late
    plan = data_parallel.plan(config, hardware, count, software)
    dp = data_parallel.cost(hardware, part, holding, plan, count, forward, backward)
    local = data_parallel.own_parameters(config, holding)
    parts = StepBreakdown(
        matmul=count * busy.matmul,
        attention=count * busy.attention,
        elementwise=count * busy.elementwise,
        recomputed=count * share * holding.blocks * one.seconds[2],
        launch=count * busy.launch,
        tp=count * busy.tp,
        cp=count * busy.cp,
        ep=count * busy.ep,
        pp=late,
        dp=dp.total,
        bubble=idle,
        optimizer=data_parallel.update(config, hardware, local, holding.blocks, software),
        offload=offload.waiting(config, hardware, part, holding, count, forward),
        # Token ids, in 8 bytes.
        data=8.0 * part.tokens * count / hardware.host_bandwidth,
        jitter=0.0,
    )
    hosts = max(1.0, config.world_size / hardware.devices_per_host)
    # The largest of n normal numbers lies about √(2 ln n) deviations above their mean.
    late_hosts = hardware.efficiency.jitter * math.sqrt(2 * math.log(hosts))
    parts = replace(parts, jitter=late_hosts * parts.seconds)
    again = (
        share
        * config.model.layers
        * one.recomputed_flops
        * count
        * config.parallel.dp
        * layout.cp
        * layout.tp
    )
    return _assemble(config, hardware, parts, parts.seconds, again)


def _assemble(
    config: ResolvedConfig,
    hardware: Hardware,
    parts: StepBreakdown,
    seconds: float,
    again: float,
) -> StepTime:
    tokens = config.tokens_per_step / seconds
    whole, causal = _flops(config.model, config.train.seq_len)
    if config.lora.rank:
        frozen = whole - trained_flops_per_token(config)
        whole, causal = whole - frozen, causal - frozen
    peak = hardware.peak(config.precision) * config.world_size
    mfu = tokens * whole / peak
    return StepTime(
        seconds=seconds,
        parts=parts,
        tokens_per_s=tokens,
        tokens_per_s_per_gpu=tokens / config.world_size,
        mfu=mfu,
        mfu_causal=tokens * causal / peak,
        hfu=mfu + again / seconds / peak,
    )


@lru_cache(maxsize=1024)
def _flops(model: Model, seq_len: int) -> tuple[int, int]:
    return flops_per_token(model, seq_len), flops_per_token_causal(model, seq_len)


def stage_costs(
    config: ResolvedConfig, hardware: Hardware, software: Software = NANOSCALE
) -> list[StageCost]:
    """Return the costs of every stage in the model's order, for one micro batch."""
    part = blocks.slice_of(config, software)
    one, ends = blocks.block(hardware, part), _ends(hardware, part)
    share, send = blocks.recomputed_share(config), _send(config, hardware, part)
    found = []
    for stage in all_stages(config):
        count = stage.layers
        work = [end for end, there in zip(ends, (stage.first, stage.last), strict=True) if there]
        forward = count * one.forward.total + sum(end.forward.total for end in work)
        backward = count * one.backward.total + sum(end.backward.total for end in work)
        products = count * one.backward.matmul + sum(end.backward.matmul for end in work)
        again = count * share * one.recomputed.total
        found.append(StageCost(forward, backward + again, _weights(config, products), send))
    return found


def training(config: ResolvedConfig, hardware: Hardware, step: StepTime) -> TrainingEstimate:
    """Return the duration and cost of `train.steps`, or of the steps of `train.tokens`."""
    hours = config.train.steps * step.seconds / 3600
    device_hours = hours * config.world_size
    price = hardware.price
    return TrainingEstimate(
        config.train.steps, hours, device_hours, None if price is None else price * device_hours
    )


def _ends(hardware: Hardware, part: MicroBatchShape) -> tuple[Passes, Passes]:
    return blocks.embedding(hardware, part), blocks.head(hardware, part)


def _load(holding: RankParameters, block: float, ends: tuple[Passes, Passes]) -> float:
    """Return the seconds of a rank for one micro batch."""
    seconds = holding.blocks * block
    if holding.first:
        seconds += ends[0].seconds[0] + ends[0].seconds[1]
    if holding.last:
        seconds += ends[1].seconds[0] + ends[1].seconds[1]
    return seconds


def _busy(holding: RankParameters, one: Passes, ends: tuple[Passes, Passes]) -> Work:
    """Return forward and backward of a rank for one micro batch, without recomputation."""
    number, block = holding.blocks, one.both
    first = ends[0].both if holding.first else NOTHING
    last = ends[1].both if holding.last else NOTHING
    return Work(
        number * block.matmul + first.matmul + last.matmul,
        number * block.attention,
        number * block.elementwise + first.elementwise + last.elementwise,
        number * block.launch,
        number * block.tp + first.tp + last.tp,
        number * block.cp,
        number * block.ep,
    )


def _send(config: ResolvedConfig, hardware: Hardware, part: MicroBatchShape) -> float:
    """Return the seconds to send the residual stream from a stage to the next."""
    layout = config.parallel
    if layout.pp == 1:
        return 0.0
    ranks = collectives.group(hardware, layout.pp, layout.tp * layout.cp * layout.dp)
    return collectives.send(
        hardware, ranks, part.stream * part.model.hidden * operations.WIDTH[part.wide]
    )


def _waiting(
    config: ResolvedConfig,
    hardware: Hardware,
    part: MicroBatchShape,
    one: Passes,
    ends: tuple[Passes, Passes],
) -> tuple[float, float]:
    """Return the seconds that a pipeline rank waits: those with free sends, and the addition by sends."""
    layout, layers, virtual = config.parallel, config.model.layers, config.parallel.virtual_stages
    if layout.pp == 1:
        return 0.0, 0.0
    stages = layout.pp * virtual
    again = blocks.recomputed_share(config) * one.seconds[2]
    forward = (layers * one.seconds[0] + ends[0].seconds[0] + ends[1].seconds[0]) / stages
    backward = (
        layers * (one.seconds[1] + again) + ends[0].seconds[1] + ends[1].seconds[1]
    ) / stages
    weights = _weights(config, layers * one.backward.matmul + ends[1].backward.matmul) / stages
    count, times = config.accumulation, (forward, backward - weights, weights)
    idle = bubble(layout.schedule, layout.pp, virtual, count, *times, 0.0)
    send = _send(config, hardware, part)
    return idle, bubble(layout.schedule, layout.pp, virtual, count, *times, send) - idle


def _weights(config: ResolvedConfig, backward_products: float) -> float:
    """Return the seconds for the gradients of weights: half of the products, or next to none with adapters; the
    rest is for inputs."""
    return 0.0 if config.lora.rank else backward_products / 2
