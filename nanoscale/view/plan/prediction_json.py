"""A prediction as a JSON document: `plan --json`, and `plan.json` of a run."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from nanoscale.common.units import GIB
from nanoscale.config.hardware.usual_mfu import usual_mfu
from nanoscale.config.model_math import active_parameters, parameters
from nanoscale.plan.memory.peak import RankMemory
from nanoscale.plan.predict import Prediction, tokens_per_s_in_bf16
from nanoscale.plan.saving import plan_saving


def document(plan: Prediction) -> dict[str, Any]:
    """Return the document; sizes are in GiB, times in s."""
    time, layout = plan.time, plan.config.parallel
    return {
        "fits": plan.fits,
        "fits_probability": round(plan.fits_probability, 4),
        "memory": _memory(plan),
        "rehearsed": _rehearsed(plan),
        "step_time_s": time.seconds,
        "step_parts_s": asdict(time.parts),
        "tokens_per_s": time.tokens_per_s,
        "tokens_per_s_per_gpu": time.tokens_per_s_per_gpu,
        "bf16_tokens_per_s_per_gpu": tokens_per_s_in_bf16(plan),
        "mfu": time.mfu,
        "mfu_causal": time.mfu_causal,
        "hfu": time.hfu,
        "usual_mfu": usual_mfu(plan.config),
        "pipeline_utilization": plan.timeline.utilization if plan.timeline is not None else None,
        "training": asdict(plan.training),
        "checkpoints": plan_saving(plan.config, time.seconds).document(),
        "parameters": parameters(plan.config.model),
        "active_parameters": active_parameters(plan.config.model),
        "layout": {
            name: getattr(layout, name) for name in ("dp", "dp_replicate", "tp", "pp", "cp", "ep")
        },
        "software": {"name": plan.software.name, "about": plan.software.about},
        "hardware": {"device": plan.hardware.device, "memory_gib": plan.hardware.memory_gib},
    }


def bf16_advice(fp32: float, bf16: float | None) -> str | None:
    """Return the line about the speed in bf16; None if bf16 is not an option.

    Args:
        fp32: planned tokens/s of a device.
        bf16: the same in bf16, from `tokens_per_s_in_bf16`.
    """
    if bf16 is None:
        return None
    times = f"{bf16 / fp32:.1f} times as many"
    return (
        f"precision=bf16 would give {bf16:,.0f} tokens/s per device instead of {fp32:,.0f}, {times}"
    )


def _memory(plan: Prediction) -> dict[str, Any]:
    worst = plan.worst
    return {
        "worst_rank": worst.rank,
        "capacity_gib": plan.hardware.memory_gib,
        **_sizes(worst),
        "ranks": [{"rank": rank.rank, **_sizes(rank)} for rank in plan.memory],
    }


def _rehearsed(plan: Prediction) -> dict[str, Any] | None:
    rehearsed = plan.rehearsed
    if rehearsed is None:
        return None
    return {
        "fits": rehearsed.total <= plan.capacity,
        "decides": plan.decisive is not None,
        "rank": rehearsed.rank,
        "allocated_gib": rehearsed.allocated / GIB,
        "reserved_gib": rehearsed.reserved / GIB,
        "total_gib": rehearsed.total / GIB,
        "upper_bound": rehearsed.upper_bound,
    }


def _sizes(rank: RankMemory) -> dict[str, Any]:
    return {
        "allocated_gib": rank.allocated / GIB,
        "reserved_gib": rank.reserved / GIB,
        "in_use_gib": rank.total / GIB,
        "peak": rank.peak,
        "parts": {part.name: part.bytes / GIB for part in rank.parts},
        "host": {part.name: part.bytes / GIB for part in rank.host},
    }
