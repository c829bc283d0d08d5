"""The reasons for the best layout: the effect of each of its axes, and the field's rules of thumb."""

from __future__ import annotations

from collections.abc import Callable

from nanoscale.common.units import GIB, byte_size, duration
from nanoscale.config.model_math import parameters
from nanoscale.plan.predict import Prediction
from nanoscale.plan.search.search import SearchResult
from nanoscale.plan.time.offload import offloaded
from nanoscale.view.job_text import expert_degree, recomputation
from nanoscale.view.plan.prediction import MEANINGS

_AXES: dict[str, Callable[[Prediction], object]] = {
    "tp": lambda plan: plan.config.parallel.tp,
    "pp": lambda plan: plan.config.parallel.pp,
    "cp": lambda plan: plan.config.parallel.cp,
    "ep": lambda plan: expert_degree(plan.config.parallel),
    "ZeRO": lambda plan: plan.config.zero.stage,
    "offload": lambda plan: offloaded(plan.config),
    "replicas": lambda plan: plan.config.parallel.dp_replicate,
    "schedule": lambda plan: plan.config.parallel.schedule,
    "micro batch": lambda plan: plan.config.train.micro_batch,
    "recompute": lambda plan: recomputation(plan.config.parallel),
}
_LEAST_S = 0.002
"""Parts that change the step by less than this share are not mentioned."""
_LONG = 10_000
"""Tokens of a sequence above which cp is usual."""


def reasons(result: SearchResult) -> list[str]:
    """Return a sentence for each axis along which another layout comes close."""
    best = result.best
    if best is None:
        return []
    sentences = []
    for name, axis in _AXES.items():
        # dp follows from the other axes, and the schedule from pp.
        free = {name, "schedule"} if name == "pp" else {name}
        fixed = [other for key, other in _AXES.items() if key not in free]
        for plan in result.ranked:
            if axis(plan) != axis(best) and all(it(plan) == it(best) for it in fixed):
                sentences.append(_sentence(name, axis(plan), axis(best), plan, best))
                break
    return [*sentences, *advice(best)]


def _sentence(name: str, before: object, after: object, other: Prediction, best: Prediction) -> str:
    parts = {
        part: getattr(other.time.parts, part) - getattr(best.time.parts, part) for part in MEANINGS
    }
    large = [item for item in parts.items() if abs(item[1]) > _LEAST_S * best.time.seconds]
    large.sort(key=lambda item: -abs(item[1]))
    saves = [f"{duration(saved)} of {MEANINGS[part]}" for part, saved in large if saved > 0]
    costs = [f"{duration(-saved)} of {MEANINGS[part]}" for part, saved in large if saved < 0]
    memory = best.worst.total - other.worst.total
    if abs(memory) >= 0.1 * GIB:
        (costs if memory > 0 else saves).append(byte_size(abs(memory)))
    words = [
        f"{word} {', '.join(what[:3])}"
        for word, what in (("saves", saves), ("costs", costs))
        if what
    ]
    total = other.time.seconds / best.time.seconds - 1
    change = " and ".join(words) or "changes little"
    gain = f"{total:.1%} faster" if total >= 5e-4 else "as fast"
    return f"{name} {before} → {after} {change}; the step is {gain}"


def advice(best: Prediction) -> list[str]:
    """Compare the usual ladder of parallelisms, with its thresholds, with the result.

    From its lowest step: data parallelism; sharded; activations recomputed; replicas of sharded groups beyond
    some hundred devices; then context, pipeline and tensor parallelism. Source: PyTorch's guides to FSDP2 and
    torchtitan (Liang et al. 2024, arXiv:2410.06511).
    """
    config, size = best.config, parameters(best.config.model)
    layout, world = config.parallel, config.world_size
    long = config.train.seq_len > _LONG
    divided = layout.tp * layout.pp * (1 if long else layout.cp) > 1
    small = world <= 128 and size <= 1e9
    rungs = {
        "up to 128 devices and 1 B parameters, data parallelism alone is the usual choice": (
            small and divided
        ),
        "above 1 B parameters, states are usually sharded before anything else (zero.stage)": (
            size > 1e9 and world > 1 and config.zero.stage == 0
        ),
        "up to 256 devices, activations are usually recomputed before the model is divided": (
            world < 256 and not small and divided and layout.activation_checkpointing == "none"
        ),
        "from 256 devices on, replicas of a model sharded in each host (dp_replicate) spare the network": (
            256 <= world <= 512
            and layout.dp_replicate == 1
            and config.zero.stage == 3
            and layout.tp == 1
        ),
        "from 1,000 devices and 50 B parameters on, tp and pp are usual in addition to sharding": (
            world >= 1000 and size >= 50e9 and layout.tp == 1 and layout.pp == 1
        ),
        "sequences above 10,000 tokens are usually divided by cp": long and layout.cp == 1,
    }
    return [sentence for sentence, applies in rungs.items() if applies]
