"""The prediction of a job: whether it fits, its speed, its duration and its cost."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from nanoscale.common.units import GIB
from nanoscale.config.hf.equivalent import has_recurrences
from nanoscale.config.layout import takes
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.rules.backends import honored
from nanoscale.config.rules.resolution import divisors
from nanoscale.plan.hardware.hardware import Hardware, hardware_of
from nanoscale.plan.memory.peak import RankMemory, rank_memory
from nanoscale.plan.memory.states import shared_memory_bytes
from nanoscale.plan.pipeline.residents import in_flight
from nanoscale.plan.pipeline.simulation import Costs, Timeline, simulate_schedule
from nanoscale.plan.time import step as steps


def with_fitting_micro_batch(config: ResolvedConfig, hardware: Hardware) -> ResolvedConfig:
    """Return the configuration with the largest micro batch, up to its own, that fits with at least `SURE`.

    If no micro batch fits, it is the smallest one.
    """
    layout, train = config.parallel, config.train
    samples = train.global_batch // layout.dp
    for size in sorted(divisors(samples), reverse=True):
        if size > train.micro_batch or not takes(layout.schedule, layout.pp, samples // size):
            continue
        config = replace(config, train=replace(train, micro_batch=size))
        plan = predict(config, hardware)
        if plan.fits and plan.fits_probability >= SURE:
            break
    return config


SPREAD = {"dp": 0.04, "divided": 0.06, "experts": 0.10, "hf": 0.25, "recurrent": 0.50}
"""Standard deviation of the memory in use around the prediction, as a share of it, by kind of layout.

The root mean square errors of published runs are 3.3 % with FSDP alone (16 rows of torchtitan and torchao) and
5.0 % with tp, pp or cp in addition to it (8 rows of torchtitan), rounded up; runs of experts, within 1.5 % in
6 rows of SimuMax, had even loads, and 10 % is assumed. A model of transformers is planned as one of ours that
resembles it; what its recurrences keep depends on the kernels that are installed.
"""
REHEARSED_SPREAD = 0.02
"""Standard deviation of the memory in use around a rehearsal. Tests require 1 % of real ranks' memory on CPUs.
GPUs were not measured yet; 2 % is assumed."""
ENOUGH = 0.5
"""The least probability with which a layout counts as fitting."""
SURE = 0.9
"""The least probability with which a search recommends a layout, and `auto` chooses one. From `1 - SURE` to
`SURE` a plan is open."""


MOST_SIMULATED = 16_384
"""The most micro batches of a simulated pipeline; the closed forms hold for more."""

Memory = tuple[RankMemory, ...]
"""The memory of every pipeline rank."""


@dataclass(frozen=True, slots=True)
class RehearsedMemory:
    """The memory in a rehearsal of the rank that needs most memory."""

    rank: int
    phase: str
    """The phase of the peak."""
    allocated: int
    """Bytes, as in torch.cuda.max_memory_allocated."""
    reserved: int
    """Bytes, as in torch.cuda.max_memory_reserved."""
    total: int
    """Bytes in use on the device, as in nvidia-smi."""
    upper_bound: bool
    """True if compiled blocks ran eagerly."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """A configuration on its hardware."""

    config: ResolvedConfig
    hardware: Hardware
    memory: Memory
    time: steps.StepTime
    timeline: Timeline | None
    """The simulated step of the pipeline; None without a pipeline or without a simulation."""
    rehearsed: RehearsedMemory | None = None
    """The memory in a rehearsal of the configuration; None without a rehearsal."""

    @property
    def worst(self) -> RankMemory:
        """The rank that needs most memory."""
        return highest(self.memory)

    @property
    def capacity(self) -> int:
        """Bytes of the device."""
        return capacity(self.hardware)

    @property
    def ranks_of_host(self) -> int:
        return ranks_of_host(self.config, self.hardware)

    @property
    def shared_memory(self) -> int:
        """Bytes of checkpoints in the shared memory of the fullest host."""
        return shared_memory_bytes(self.config, self.ranks_of_host)

    @property
    def host_bytes(self) -> int:
        """Bytes in the memory of the fullest host, of all its ranks, and of checkpoints in memory."""
        return host_bytes(self.config, self.hardware, self.memory)

    @property
    def host_capacity(self) -> int:
        """Bytes of a host's memory."""
        return int(self.hardware.host_memory_gib * GIB)

    @property
    def fits_host(self) -> bool:
        return fits_host(self.config, self.hardware, self.memory)

    @property
    def decisive(self) -> RehearsedMemory | None:
        """The rehearsal that decides if the job fits. An upper bound above the capacity decides nothing."""
        rehearsed = self.rehearsed
        unclear = rehearsed and rehearsed.upper_bound and rehearsed.total > self.capacity
        return None if unclear else rehearsed

    @property
    def fits_probability(self) -> float:
        """The probability that the job fits its devices."""
        if self.decisive is not None:
            return fits_probability(self.decisive.total, self.capacity, REHEARSED_SPREAD)
        return fits_probability(self.worst.total, self.capacity, spread(self.config))

    @property
    def fits(self) -> bool:
        return self.fits_probability >= ENOUGH and self.fits_host

    @property
    def may_be_chosen(self) -> bool:
        """True if the job fits with `SURE`, or if `parallel.activation_memory` bounds it instead."""
        return self.fits_probability >= SURE or self.config.parallel.activation_memory is not None

    @property
    def is_open(self) -> bool:
        """True if the closed form cannot decide whether the job fits, and no rehearsal was made."""
        return self.rehearsed is None and 1 - SURE < self.fits_probability < SURE

    @property
    def training(self) -> steps.TrainingEstimate:
        return steps.training(self.config, self.hardware, self.time)


def predict(config: ResolvedConfig, hardware: Hardware | None = None) -> Prediction:
    """Predict a configuration that `rules.check` has resolved, and simulate its pipeline if `is_simulated`.

    Args:
        hardware: None: the hardware that `config.cluster` describes.

    Raises:
        UserError: the hardware is unknown or does not support the precision.
    """
    hardware = hardware or hardware_of(config)
    if not is_simulated(config):
        memory = estimate_memory(config, hardware)
        return with_time(config, hardware, memory)
    timeline = simulated(config, steps.stage_costs(config, hardware))
    memory = _memory(config, hardware, timeline.held)
    time = steps.step_time(config, hardware, timeline.makespan)
    return Prediction(config, hardware, memory, time, timeline)


def is_simulated(config: ResolvedConfig) -> bool:
    """True if a prediction simulates the pipeline: its time grows with the number of micro batches."""
    return config.parallel.pp > 1 and config.accumulation <= MOST_SIMULATED


def tokens_per_s_in_bf16(plan: Prediction) -> float | None:
    """Return the tokens/s of a device if an fp32 job on GPUs computed in bf16; None if bf16 is impossible."""
    config, precision = plan.config, plan.config.precision
    narrow = replace(config, precision=replace(precision, compute="bf16", tf32=False))
    possible = config.launcher.device == "cuda" and "bf16" in plan.hardware.peaks
    if precision.compute != "fp32" or not possible or not honored(narrow):
        return None
    return predict(narrow).time.tokens_per_s_per_gpu


_FEW_RANKS = 128
"""Ranks of data parallelism below which Megatron-Bridge reduces gradients in bf16 too."""


def gain_of_bf16_reductions(plan: Prediction) -> float:
    """Return the share of a step that reducing gradients in bf16 saves; 0 if they cannot be."""
    config, precision = plan.config, plan.config.precision
    ranks = config.parallel.dp * config.parallel.cp
    narrow = replace(config, precision=replace(precision, reduce="bf16"))
    is_wide = (precision.compute, precision.reduce) == ("bf16", "fp32")
    on_gpus = config.backend.name == "native" and config.launcher.device == "cuda"
    if not (is_wide and on_gpus and 1 < ranks < _FEW_RANKS and honored(narrow)):
        return 0.0
    return 1 - predicted_step(narrow, plan.hardware) / plan.time.seconds


def predicted_step(config: ResolvedConfig, hardware: Hardware) -> float:
    """Return the seconds of a step in `predict`, without the rest of the prediction."""
    makespan = None
    if is_simulated(config):
        makespan = simulated(config, steps.stage_costs(config, hardware)).makespan
    return steps.step_time(config, hardware, makespan).seconds


def estimate_memory(config: ResolvedConfig, hardware: Hardware, limit: float = math.inf) -> Memory:
    """Return the memory in closed form, for a search through thousands of layouts.

    Only the first ranks, which have the most in-flight micro batches, and the last, which has the logits, are
    counted; only the first one if it needs more bytes than `limit`.
    """
    layout = config.parallel
    if layout.pp == 1:
        return _memory(config, hardware, None)
    count = config.accumulation
    counts = in_flight(layout.schedule, layout.pp, layout.virtual_stages, count)
    first = _memory(config, hardware, counts, [0])
    if first[0].total > limit:
        return first
    return first + _memory(config, hardware, counts, sorted({1, layout.pp - 1}))


def with_time(config: ResolvedConfig, hardware: Hardware, memory: Memory) -> Prediction:
    """Return a prediction in closed form from memory that was computed before."""
    time = steps.step_time(config, hardware)
    return Prediction(config, hardware, memory, time, None)


def simulated(config: ResolvedConfig, stages: Sequence[steps.StageCost]) -> Timeline:
    """Simulate a step of the pipeline, action by action."""
    layout = config.parallel
    costs = Costs(
        [stage.forward for stage in stages],
        [stage.backward - stage.weights for stage in stages],
        [stage.weights for stage in stages],
        [stage.send for stage in stages[:-1]],
    )
    return simulate_schedule(
        layout.schedule, layout.pp, layout.virtual_stages, config.accumulation, costs
    )


def capacity(hardware: Hardware) -> int:
    """Return the bytes of a device."""
    return int(hardware.memory_gib * GIB)


def ranks_of_host(config: ResolvedConfig, hardware: Hardware) -> int:
    """Return the number of ranks of a host."""
    return min(hardware.devices_per_host, config.world_size)


def host_bytes(config: ResolvedConfig, hardware: Hardware, memory: Memory) -> int:
    """Return the bytes in the memory of the fullest host, of all its ranks, and of checkpoints in memory.

    Neighboring ranks have the same pipeline rank. Where a host has several of them, they are taken to be the
    largest.
    """
    each = sorted((sum(part.bytes for part in rank.host) for rank in memory), reverse=True)
    ranks = ranks_of_host(config, hardware)
    alike = min(ranks, config.world_size // config.parallel.pp)
    largest = (each + each[:1] * ranks)[: -(-ranks // alike)]
    return alike * sum(largest) + shared_memory_bytes(config, ranks)


def fits_host(config: ResolvedConfig, hardware: Hardware, memory: Memory) -> bool:
    """True if a host has memory for what its ranks keep there. On a CPU, it is the memory of the devices."""
    is_cpu = config.launcher.device == "cpu"
    return is_cpu or host_bytes(config, hardware, memory) <= hardware.host_memory_gib * GIB


def spread(config: ResolvedConfig) -> float:
    """Return the standard deviation of the prediction's error, as a share of the memory in use."""
    layout = config.parallel
    if config.model.source == "hf":
        return SPREAD["recurrent" if has_recurrences(config.model) else "hf"]
    if config.model.experts:
        return SPREAD["experts"]
    divided = max(layout.tp, layout.pp, layout.cp) > 1
    return SPREAD["divided" if divided else "dp"]


def fits_probability(needed: int, capacity: int, spread: float) -> float:
    """Return the probability that `capacity` bytes suffice if `needed` are predicted.

    The error is normal, with `spread` as its standard deviation (`spread`).
    """
    return 0.5 * math.erfc((needed - capacity) / (spread * needed) / math.sqrt(2))


def filled_share(memory: Memory, capacity: int) -> float:
    """Return the largest share of the memory without states and work space that stored activations fill.

    It is the largest of all ranks and phases of a step.
    """
    shares = [0.0]
    for rank in memory:
        room = capacity - (rank.total - rank.allocated)
        for phase in rank.phases.phases:
            kept = phase.levels["activations"]
            shares.append(kept / max(1, room - phase.allocated + kept))
    return max(shares)


def highest(memory: Memory) -> RankMemory:
    """Return the rank that needs most memory."""
    return max(memory, key=lambda rank: rank.total)


def _memory(
    config: ResolvedConfig,
    hardware: Hardware,
    in_flight: Sequence[Sequence[int]] | None,
    ranks: Sequence[int] | None = None,
) -> Memory:
    context = int(hardware.context_gib * GIB) if config.launcher.device == "cuda" else 0
    return tuple(rank_memory(config, in_flight, ranks=ranks, context_bytes=context))
