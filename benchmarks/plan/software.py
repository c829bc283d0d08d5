"""Training engines other than nanoscale, for comparing the planner with what was published of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

from benchmarks.plan.megatron_memory import Recipe, experts_of, megatron_phases
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.plan.hardware.hardware import NANOSCALE, Software, hardware_of
from nanoscale.plan.memory.native import native_phases
from nanoscale.plan.memory.peak import RankMemory, setting_memory
from nanoscale.plan.memory.phases import Phase, RankPhases
from nanoscale.plan.memory.setting import MemorySetting, setting_of
from nanoscale.plan.memory.shards import RankParameters
from nanoscale.plan.memory.states import BytesPerParameter
from nanoscale.plan.predict import Prediction, is_simulated, simulated
from nanoscale.plan.time.step import stage_costs, step_time

# Fitted to the building half of the runs of 2026, as `WORDS` and `FSDP_OVERLAP` are:
GROUPED = 0.7
"""`Software.grouped` of Transformer Engine's kernels."""
HOST_S = 4.4e-3
"""`Software.host_s` of Megatron-LM without CUDA graphs: 8.8 ms for both passes of Qwen3-30B-A3B on 8 B200."""
TP_HOST = 4 / 3
"""The factor on it with tp: a third more operations, counted. No row of the building half decides it."""
MXFP8_CAST_BYTES = 4 + 1 / 16
"""`Software.cast_bytes` of Transformer Engine's MXFP8, counted: 16 bits are read, two orders of 8 bits
with a scale for 32 numbers each are written."""
TORCH = Software("torch", composed_norm=True, dtensor=True, narrow_gathers=True)
"""PyTorch-native software with FSDP2 and DTensor, such as torchtitan."""
TORCH_WHOLELOSS = replace(TORCH, name="torch-wholeloss")
"""The same, with all logits of a micro batch in memory at once."""
MEGATRON = Software(
    "megatron",
    fused=True,
    copies="host",
    sums_in_products=True,
    hidden_tp="both",
    narrow_gathers=True,
    cast_bytes=3,
    grouped=GROUPED,
    host_s=HOST_S,
    distributed_optimizer=True,
)
"""Megatron-LM or NeMo with Transformer Engine: what the hardware has been shown to reach."""
AUTOMODEL = replace(
    TORCH,
    name="automodel",
    fused=True,
    composed_norm=False,
    dtensor=False,
    copies="host",
    grouped=GROUPED,
)
"""NeMo AutoModel: FSDP2 with Transformer Engine's products and DeepEP."""
RECORDS = {it.name: it for it in (NANOSCALE, TORCH, TORCH_WHOLELOSS, MEGATRON, AUTOMODEL)}
"""The records by name."""
WORDS: dict[str, dict[str, Any]] = {
    "alltoall": {"copies": "expert"},
    "overlap": {"hidden_ep": 0.8},
    "router-graphs": {"host_s": HOST_S / 2},
    "graphs": {"host_s": 1e-6, "hidden_ep": 0.8},
    "fsdp": {},
}
"""Words behind a record's name, and what they change. Attention, router and preparation are half of HOST_S."""
FSDP_OVERLAP = 0.3
"""`Efficiency.overlap` of Megatron's FSDP, whose collectives take few multiprocessors (NCCL_CTA_POLICY=1)."""


@cache
def record(name: str, precision: str = "") -> Software:
    """Return a record by its name, which words may follow: megatron-alltoall-overlap."""
    if precision == "mxfp8":
        return replace(record(name), cast_bytes=MXFP8_CAST_BYTES)
    if name in RECORDS:
        return RECORDS[name]
    word = next(word for word in sorted(WORDS, key=len, reverse=True) if name.endswith(f"-{word}"))
    return replace(record(name.removesuffix(f"-{word}")), name=name, **WORDS[word])


def predict(config: ResolvedConfig, software: Software, recipe: Recipe | None = None) -> Prediction:
    """Return `plan.predict.predict` of a job of at most `MOST_SIMULATED` micro batches for other software."""
    hardware, timeline, held, makespan = hardware_of(config), None, None, None
    if config.parallel.tp > 1:
        software = replace(software, host_s=TP_HOST * software.host_s)
    if software.name.endswith("-fsdp"):
        own = replace(hardware.efficiency, overlap=FSDP_OVERLAP)
        hardware = replace(hardware, efficiency=own)
    if is_simulated(config):
        timeline = simulated(config, stage_costs(config, hardware, software))
        held, makespan = timeline.held, timeline.makespan
    memory = memory_of(software_setting(config, software, recipe), held, recipe)
    time = step_time(config, hardware, makespan, software)
    return Prediction(config, hardware, tuple(memory), time, timeline)


def memory_of(
    setting: MemorySetting, in_flight: Sequence[Sequence[int]] | None, recipe: Recipe | None = None
) -> list[RankMemory]:
    """Return every pipeline rank's memory for a setting of other software."""
    phases = megatron_phases if setting.flat else torch_phases
    return setting_memory(setting, in_flight, partial(phases, recipe or Recipe()))


def software_setting(
    config: ResolvedConfig, software: Software, recipe: Recipe | None = None
) -> MemorySetting:
    """Return the memory setting of a job for other software.

    If the software computes all logits at once, the forward pass keeps the log-softmax in fp32 or better. The
    backward pass adds the gradients of the log-softmax and of the logits, and one more tensor if tp divides the
    vocabulary (torch.distributed.tensor.parallel.loss).
    """
    setting = setting_of(config)
    setting = replace(setting, narrow_weights=software.torchao * setting.narrow_weights)
    recipe = recipe or Recipe()
    if software.distributed_optimizer:
        return _megatron_setting(setting, recipe)
    run = setting.run
    composed = run.composed_norm or (software.composed_norm and config.backend.compile != "on")
    setting = replace(setting, run=replace(run, composed_norm=composed))
    if software.name != TORCH_WHOLELOSS.name:
        return setting
    backward = setting.loss * (3 if setting.vocabulary_parallel else 2)
    return replace(setting, whole_logits=(setting.loss, backward))


def _megatron_setting(setting: MemorySetting, recipe: Recipe) -> MemorySetting:
    """Return Megatron-LM's setting, with Transformer Engine's fused blocks and a fused cross-entropy.

    Weights in the compute dtype and gradients in fp32 are unsharded flat buffers. Master weights and moments
    are sharded. Products save this rank's shard of their input, and gather the input again in the backward pass
    (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2).
    """
    compute = setting.compute
    return replace(
        setting,
        run=replace(setting.run, gathered=False, fused=False, fused_activation=True, tile=1),
        flat=True,
        single=False,
        states=BytesPerParameter(
            weights=4,
            copy=compute,
            gradients=4,
            optimizer=recipe.moments,
            in_blocks=recipe.moments,
            frozen=compute,
        ),
        whole_logits=(compute, 0 if recipe.loss_in_place else setting.loss),
    )


def torch_phases(
    recipe: Recipe, setting: MemorySetting, params: RankParameters, in_flight: Sequence[int]
) -> RankPhases:
    """Return the phases of FSDP2.

    If all logits of a micro batch exist at once, the allocator cannot use the freed logits again: all tensors
    of the loss are larger.
    """
    rank = native_phases(setting, params, in_flight)
    if recipe.plain_experts and setting.config.parallel.ep == setting.shards:
        rank = replace(
            rank, phases=tuple(_plain_experts(setting, params, it) for it in rank.phases)
        )
    if setting.whole_logits is None or not params.last:
        return rank
    loss, *others = rank.phases
    unusable = setting.shape.tokens * setting.vocabulary * setting.compute
    return replace(rank, phases=(replace(loss, pooled=loss.pooled - unusable), *others))


def _plain_experts(setting: MemorySetting, params: RankParameters, phase: Phase) -> Phase:
    """Return the phase if experts have no gathered copy, and gradients in the compute dtype."""
    experts = experts_of(params)
    less = {
        "compute_copies": setting.compute * experts,
        "gradients": (setting.accumulated - setting.compute) * experts,
    }
    levels = {name: max(0, size - less.get(name, 0)) for name, size in phase.levels.items()}
    freed = sum(phase.levels.values()) - sum(levels.values())
    return replace(phase, levels=levels, allocated=phase.allocated - freed)
