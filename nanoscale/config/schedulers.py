"""The schedules of the learning rate: a row for each, which rules, translations and the training read."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from nanoscale.config.schema import Scheduler


@dataclass(frozen=True, slots=True)
class DecayRule:
    """A row of the table: the decay after the warm-up."""

    decay: Callable[[float], float]
    """A function from the share of the decay's steps that are done to the share of the fall to the minimum."""
    has_own_steps: bool = False
    """True if the decay takes the last `scheduler.decay_steps` steps, after a stable phase, not all steps."""
    deepspeed_name: str | None = None


def _cosine(progress: float) -> float:
    return (1 - math.cos(math.pi * progress)) / 2


SCHEDULERS = {
    # Loshchilov & Hutter 2017, arXiv:1608.03983, eq. 5, without restarts
    "cosine": DecayRule(_cosine, deepspeed_name="WarmupCosineLR"),
    "linear": DecayRule(lambda progress: progress, deepspeed_name="WarmupDecayLR"),
    "constant": DecayRule(lambda _: 0.0, deepspeed_name="WarmupLR"),
    # Hu et al. 2024, arXiv:2404.06395, section 4
    "wsd": DecayRule(lambda progress: progress, has_own_steps=True),
}


def lr_factor(scheduler: Scheduler, step: int, steps: int) -> float:
    """Return the multiple of the peak rate for the update that ends `step`, of 1 … `steps`.

    The linear warm-up reaches the peak at `warmup_steps`. A decay reaches `min_ratio` at `steps`.
    """
    if step <= scheduler.warmup_steps:
        return step / scheduler.warmup_steps
    rule, start = SCHEDULERS[scheduler.name], scheduler.warmup_steps
    if rule.has_own_steps:
        assert scheduler.decay_steps is not None, "the launcher freezes a number"
        start = max(start, steps - scheduler.decay_steps)
    progress = max(0, step - start) / max(1, steps - start)
    return 1 - (1 - scheduler.min_ratio) * rule.decay(progress)
