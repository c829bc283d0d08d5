"""The time of a step, divided into its parts, and the figures that follow: tokens/s, MFU, a run's duration and
cost. Sizes of the model whose products a device computes slowly are found with it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from operator import itemgetter

from nanoscale.config.hf.equivalent import as_own
from nanoscale.config.model_math import (
    flops_per_token,
    flops_per_token_causal,
    trained_flops_per_token,
)
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.schema import Model
from nanoscale.plan.hardware.hardware import NANOSCALE, Hardware, Software
from nanoscale.plan.memory.shards import RankParameters, all_stages, kinds_of_ranks
from nanoscale.plan.pipeline.closed_forms import bubble
from nanoscale.plan.time import block as blocks
from nanoscale.plan.time import collectives, data_parallel, offload, operations
from nanoscale.plan.time.micro_batch_shape import NOTHING, WORK, MicroBatchShape, Passes, Work


@dataclass(frozen=True, slots=True)
class StepBreakdown:
    """Seconds of a step on the busiest pipeline rank. The sum of all parts is the time of the step."""

    matmul: float
    attention: float
    elementwise: float
    recomputed: float
    """Recomputation for the backward pass."""
    launch: float
    """The device waits until the CPU has started kernels."""
    tp: float
    cp: float
    ep: float
    """The exchange of tokens with their experts."""
    pp: float
    """The transfer of activations and their gradients between stages."""
    dp: float
    """Exposed gathers and reductions, the slowdown of computation by overlapped ones, and copies."""
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
    """Model FLOPs over the peak, with attention to all pairs (PaLM, Chowdhery et al. 2022, appendix B)."""
    mfu_causal: float
    """MFU with the causal half of attention's FLOPs."""
    hfu: float
    """MFU plus the FLOPs of recomputation over the peak."""


@dataclass(frozen=True, slots=True)
class StageCost:
    """Seconds of one micro batch in one stage, for the simulation of a schedule."""

    forward: float
    backward: float
    """The backward pass, including recomputation."""
    weights: float
    """The part of `backward` for the weights' gradients. Some schedules run this part separately."""
    send: float
    """The transfer of activations to the next stage, or of gradients from the next stage."""


@dataclass(frozen=True, slots=True)
class TrainingEstimate:
    """The duration and cost of a whole run."""

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
        makespan: seconds of the pipeline's schedule, from its simulation; None: use the closed form.
    """
    config, layout = as_own(config), config.parallel
    shape = blocks.micro_batch_shape(config, software)
    one, ends = blocks.block(hardware, shape), _ends(hardware, shape)
    share, count = blocks.recomputed_share(config), config.accumulation
    computed = one.seconds[0] + one.seconds[1] + share * one.seconds[2]
    forward, backward, _ = passes = _block_seconds(config, hardware, shape, one)
    shards = data_parallel.shards(config)
    kinds = kinds_of_ranks(config, shards)
    loads = [(_load(kind, forward + backward, ends), kind) for kind in kinds]
    load, holding = max(loads, key=itemgetter(0))
    busy = _busy(holding, one, ends)
    if config.train.objective == "kto":  # answers to other questions are read before the step
        more = _busy(holding, one, ends, "forward")
        busy = Work(*(getattr(busy, name) + getattr(more, name) for name in WORK))
    idle, transfers = _waiting(config, hardware, shape, ends, passes)
    if makespan is not None:
        waiting = max(0.0, makespan - count * load)
        transfers = min(transfers, waiting)
        idle = waiting - transfers
    plan = data_parallel.plan(config, hardware, count, software)

    def update_of(kind: RankParameters) -> tuple[float, float]:
        """Return the seconds of dp and of the optimizer on a rank of this kind."""
        dp = data_parallel.cost(hardware, shape, kind, plan, count, forward, backward)
        local = data_parallel.updated_parameters(config, kind)
        return dp, data_parallel.update(config, hardware, local, kind.blocks, software)

    # All ranks of a pipeline end together, and then the step waits for the slowest of them.
    dp, update = max(map(update_of, kinds), key=sum)
    parts = StepBreakdown(
        **{name: count * getattr(busy, name) for name in WORK},
        recomputed=count * share * holding.blocks * one.seconds[2],
        pp=transfers,
        dp=dp + data_parallel.tied_embedding(config, hardware),
        bubble=idle,
        optimizer=update,
        offload=count * holding.blocks * (forward + backward - computed),
        # Token ids, in 8 bytes.
        data=8.0 * shape.tokens * count / hardware.host_bandwidth,
        jitter=0.0,
    )
    hosts = max(1.0, config.world_size / hardware.devices_per_host)
    # The largest of n normal numbers lies about √(2 ln n) standard deviations above their mean.
    slowest_host = hardware.efficiency.jitter * math.sqrt(2 * math.log(hosts))
    parts = replace(parts, jitter=slowest_host * parts.seconds)
    flops = share * config.model.layers * one.recomputed_flops
    recomputed = flops * count * layout.dp * layout.cp * layout.tp
    return _assemble(config, hardware, parts, recomputed)


def _assemble(
    config: ResolvedConfig, hardware: Hardware, parts: StepBreakdown, recomputed_flops: float
) -> StepTime:
    seconds = parts.seconds
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
        hfu=mfu + recomputed_flops / seconds / peak,
    )


@lru_cache(maxsize=1024)
def _flops(model: Model, seq_len: int) -> tuple[int, int]:
    return flops_per_token(model, seq_len), flops_per_token_causal(model, seq_len)


def stage_costs(
    config: ResolvedConfig, hardware: Hardware, software: Software = NANOSCALE
) -> list[StageCost]:
    """Return the costs of every stage for one micro batch, in the order of the model's layers."""
    config = as_own(config)
    shape = blocks.micro_batch_shape(config, software)
    one, ends = blocks.block(hardware, shape), _ends(hardware, shape)
    send = _send(config, hardware, shape)
    block_seconds = _block_seconds(config, hardware, shape, one)
    stage_costs = []
    for stage in all_stages(config):
        count = stage.layers
        work = [end for end, has in zip(ends, (stage.first, stage.last), strict=True) if has]
        forward, backward = (
            count * block_seconds[i] + sum(end.seconds[i] for end in work) for i in (0, 1)
        )
        products = count * block_seconds[2] + sum(end.backward.matmul for end in work)
        stage_costs.append(StageCost(forward, backward, _weights(config, products), send))
    return stage_costs


def training(config: ResolvedConfig, hardware: Hardware, step: StepTime) -> TrainingEstimate:
    """Return the duration and cost of `train.steps`, or of the steps of `train.tokens`."""
    hours = config.train.steps * step.seconds / 3600
    device_hours = hours * config.world_size
    cost = None if hardware.price is None else hardware.price * device_hours
    return TrainingEstimate(config.train.steps, hours, device_hours, cost)


def _block_seconds(
    config: ResolvedConfig, hardware: Hardware, shape: MicroBatchShape, one: Passes
) -> tuple[float, ...]:
    """Return the seconds of a block's forward pass, of its backward pass with recomputation, and of that
    pass's products. Each contains the time in which it waits for the CPU and for copies to host memory."""
    computed = one.seconds[1] + blocks.recomputed_share(config) * one.seconds[2]
    forward, backward = offload.with_copies(config, hardware, shape, one.seconds[0], computed)
    return forward, backward, one.products + backward - computed


def _ends(hardware: Hardware, shape: MicroBatchShape) -> tuple[Passes, Passes]:
    return blocks.embedding(hardware, shape), blocks.head(hardware, shape)


def _load(holding: RankParameters, block: float, ends: tuple[Passes, Passes]) -> float:
    """Return the seconds of a rank for one micro batch."""
    first, last = (sum(end.seconds[:2]) for end in ends)  # without recomputation
    return holding.blocks * block + holding.first * first + holding.last * last


def _busy(
    holding: RankParameters, one: Passes, ends: tuple[Passes, Passes], part: str = "both"
) -> Work:
    """Return the work of a rank for one micro batch, forward and backward, without recomputation; `part` is
    `forward` for a forward pass alone."""
    count, block = holding.blocks, getattr(one, part)
    first = getattr(ends[0], part) if holding.first else NOTHING
    last = getattr(ends[1], part) if holding.last else NOTHING
    seconds = ([getattr(it, name) for it in (block, first, last)] for name in WORK)
    return Work(*(count * of_block + begin + end for of_block, begin, end in seconds))


def _send(config: ResolvedConfig, hardware: Hardware, shape: MicroBatchShape) -> float:
    """Return the seconds to send one micro batch's residual stream to the next stage."""
    layout = config.parallel
    if layout.pp == 1:
        return 0.0
    ranks = collectives.group(hardware, layout.pp, layout.tp * layout.cp * layout.dp)
    size = shape.stream * shape.model.hidden * operations.WIDTH[shape.dtype]
    return collectives.send(hardware, ranks, size)


def _waiting(
    config: ResolvedConfig,
    hardware: Hardware,
    shape: MicroBatchShape,
    ends: tuple[Passes, Passes],
    block_seconds: tuple[float, ...],
) -> tuple[float, float]:
    """Return the seconds that a pipeline rank waits in a step: the bubble if transfers took no time, and the
    waiting that transfers add."""
    layout, layers, virtual = config.parallel, config.model.layers, config.parallel.virtual_stages
    if layout.pp == 1:
        return 0.0, 0.0
    stages = layout.pp * virtual
    forward, backward = (
        (layers * block_seconds[i] + ends[0].seconds[i] + ends[1].seconds[i]) / stages
        for i in (0, 1)
    )
    weights = _weights(config, layers * block_seconds[2] + ends[1].backward.matmul) / stages
    count, times = config.accumulation, (forward, backward - weights, weights)
    idle = bubble(layout.schedule, layout.pp, virtual, count, *times, 0.0)
    send = _send(config, hardware, shape)
    return idle, bubble(layout.schedule, layout.pp, virtual, count, *times, send) - idle


def _weights(config: ResolvedConfig, backward_products: float) -> float:
    """Return the part of a backward pass for the gradients of weights: half of its products, or with adapters
    0."""
    return 0.0 if config.lora.rank else backward_products / 2


_MULTIPLES = (64, 128)
"""Columns of a matrix that fill the tiles in which devices compute."""
_LEAST_GAIN = 1e-3
"""The share of a step below which a gain is not mentioned."""


@dataclass(frozen=True, slots=True)
class Padding:
    """A size that misses the multiples, and the larger size with the fastest step."""

    key: str
    size: int
    padded: int
    gain: float
    """The share of the step's time that the larger size would save."""


def paddings(config: ResolvedConfig, hardware: Hardware) -> Iterator[Padding]:
    """Yield each size that makes a step slower than a larger size would.

    Pretrained models keep their sizes, and CPUs have no tiles.
    """
    if config.model.init_from is not None or hardware.multiprocessors == 1:
        return
    now = step_time(config, hardware).seconds
    for name, ranks in (("hidden", 1), ("ffn", config.parallel.tp), ("vocab", config.parallel.tp)):
        size = getattr(config.model, name)
        larger = {-(-size // (ranks * each)) * ranks * each for each in _MULTIPLES} - {size}
        models = {padded: replace(config.model, **{name: padded}) for padded in larger}
        times = {
            padded: step_time(replace(config, model=model), hardware).seconds
            for padded, model in models.items()
        }
        best = min(times, key=times.__getitem__, default=None)
        if best is not None and times[best] < now * (1 - _LEAST_GAIN):
            yield Padding(f"model.{name}", size, best, 1 - times[best] / now)
