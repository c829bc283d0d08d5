"""The peak memory of every pipeline rank, divided into parts. Among the rank's dp, cp and tp peers the largest
counts.

A step goes through phases (the loss, the backward pass of the last block, the end of the backward pass, the
update). The phase with the most allocated memory is the peak. PyTorch reserves more than it allocates: its
caching allocator keeps a pool of memory for every stream, and memory of one pool cannot serve another stream.
So reserved memory is the sum of the peaks of all pools, plus fragmentation.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from nanoscale.common.units import byte_size, counted
from nanoscale.config.hf.equivalent import as_own
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.plan.memory.in_flight_activations import InFlightActivations, activations_at_peaks
from nanoscale.plan.memory.loss import LOGITS_AT_ONCE
from nanoscale.plan.memory.native import native_phases
from nanoscale.plan.memory.phases import MemoryEvent, MemoryPart, Phase, RankPhases, phases_of
from nanoscale.plan.memory.setting import MemorySetting, setting_of
from nanoscale.plan.memory.shards import RankParameters, rank_holdings

HOLES = 0.05
"""Assumed: fragmentation as a share of allocated memory. PyTorch's caching allocator rounds sizes up (to 2 MiB
for large tensors), and the remainder of a freed block is often too small for another tensor."""
CONTEXT = int(1.5 * 2**30)
"""Bytes of the CUDA context with cuBLAS, cuDNN and NCCL's channels, if the hardware's description has none."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The memory of a pipeline rank at its peak."""

    rank: int
    stages: tuple[int, ...]
    peak: str
    """The phase of the peak."""
    allocated: int
    """Bytes, as in torch.cuda.max_memory_allocated."""
    reserved: int
    """Bytes, as in torch.cuda.max_memory_reserved."""
    context: int
    """Bytes in use on the device outside of PyTorch's allocator."""
    phase: Phase
    phases: RankPhases

    @property
    def total(self) -> int:
        """Bytes in use on the device, as in nvidia-smi."""
        return self.reserved + self.context

    @property
    def parts(self) -> tuple[MemoryPart, ...]:
        """The allocated parts, fragmentation and context, whose sum is `total`."""
        parts = [
            MemoryPart(name, size, partial(self._explain, name, size))
            for name, size in self.phase.parts.items()
        ]
        holes = self.reserved - self.allocated
        parts.append(MemoryPart("fragmentation", holes, partial(_explain_holes, self)))
        why = "the device's context, libraries and NCCL's channels: {}".format
        size = self.context
        return (*parts, MemoryPart("context", size, partial(why, byte_size(size))))

    def _explain(self, name: str, size: int) -> str:
        if not size:
            return f"none at the highest point of the step, '{self.peak}'"
        return self.phases.explain(name, self.phase)

    @property
    def host(self) -> tuple[MemoryPart, ...]:
        """The parts in host memory."""
        return tuple(
            MemoryPart(name, size, partial("{} of this rank in host memory".format, name))
            for name, size in self.phases.host
            if size
        )

    def part(self, name: str) -> MemoryPart:
        return next(part for part in self.parts if part.name == name)


def rank_memory(
    config: ResolvedConfig,
    in_flight: Sequence[Sequence[int]] | None = None,
    *,
    ranks: Sequence[int] | None = None,
    context_bytes: int | None = None,
) -> list[RankMemory]:
    """Return every pipeline rank's memory.

    Args:
        config: resolved by `rules.check`.
        in_flight: for each pipeline rank and each of its stages, the number of micro batches with activations
            at the peak; None: one, as without a pipeline.
        ranks: the pipeline ranks to return; None: all.
        context_bytes: bytes outside of PyTorch's allocator; None: `CONTEXT` on a GPU, 0 on a CPU.
    """
    setting = setting_of(as_own(config))
    phases_of = deepspeed_phases if setting.flat else native_phases
    return setting_memory(setting, in_flight, phases_of, ranks=ranks, context_bytes=context_bytes)


def setting_memory(
    setting: MemorySetting,
    in_flight: Sequence[Sequence[int]] | None,
    phases_of: Callable[[MemorySetting, RankParameters, Sequence[int]], RankPhases],
    *,
    ranks: Sequence[int] | None = None,
    context_bytes: int | None = None,
) -> list[RankMemory]:
    """Return every pipeline rank's memory from a backend's function of the phases of a rank."""
    if context_bytes is None:
        context_bytes = CONTEXT if setting.gpu else 0
    holdings = rank_holdings(setting.config, setting.shards)
    memory = []
    for rank in range(setting.pp) if ranks is None else ranks:
        params = holdings[rank]
        counts = in_flight[rank] if in_flight is not None else [1] * len(params.stages)
        phases = phases_of(setting, params, counts)
        copy = ("checkpoint copy", _checkpoint_copy(setting, params.trained))
        phases = RankPhases(phases.phases, phases.pools, (*phases.host, copy), phases.explain)
        numbers = tuple(stage.number for stage in params.stages)
        peak = max(phases.phases, key=lambda phase: phase.allocated)
        allocated = reserved = peak.allocated
        if setting.gpu:
            default = max(it.allocated - it.pooled for it in phases.phases)
            reserved = int(max(allocated, default + phases.pools) * (1 + HOLES))
        sizes = allocated, reserved, context_bytes
        memory.append(RankMemory(rank, numbers, peak.name, *sizes, peak, phases))
    return memory


def _checkpoint_copy(setting: MemorySetting, params: RankParameters) -> int:
    """Return the bytes of the copy in host memory from which checkpoints are written during the training."""
    saving = setting.config.checkpoint
    during = saving.every or saving.every_minutes or saving.keep_best
    if not (saving.asynchronous and during):
        return 0
    share = -(-params.numel // setting.shards) if setting.flat else params.shard
    moments = setting.states.moments(share, 0 if setting.flat else params.in_blocks_shard)
    return int(setting.states.weights * share) + moments


def _explain_holes(memory: RankMemory) -> str:
    return (
        f"one pool for each stream ({byte_size(memory.phases.pools)} for gathers and reductions), and holes of "
        f"{HOLES:.0%}: {byte_size(memory.reserved)} reserved − {byte_size(memory.allocated)} allocated"
    )


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
