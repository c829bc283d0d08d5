"""The schedules of the learning rate: a row for each, which rules, translations and the training read."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from nanoscale.config.schema import Scheduler, Train
from nanoscale.config.training_phases import piecewise


@dataclass(frozen=True, slots=True)
class DecayRule:
    """A row of the table: the decay after the warm-up."""

    decay: Callable[[float], float] = lambda _: 0.0
    """A function from the share of the decay's steps that are done to the share of the fall to the minimum."""
    factor: Callable[[Scheduler, int, Train], float] | None = None
    """The multiple of the peak rate after the warm-up, if it depends on more than that share."""
    has_own_steps: bool = False
    """True if the decay takes the last `scheduler.decay_steps` steps, after a stable phase, not all steps."""
    deepspeed_name: str | None = None


def _inverse_sqrt(scheduler: Scheduler, step: int, _: Train) -> float:
    """Return √(warmup_steps / step) (Vaswani et al. 2017, arXiv:1706.03762, section 5.3)."""
    return max(scheduler.min_ratio, math.sqrt(max(1, scheduler.warmup_steps) / step))


PIECEWISE = "piecewise"
SCHEDULERS = {
    # Loshchilov & Hutter 2017, arXiv:1608.03983, eq. 5, without restarts
    "cosine": DecayRule(
        lambda progress: (1 - math.cos(math.pi * progress)) / 2, deepspeed_name="WarmupCosineLR"
    ),
    "linear": DecayRule(lambda progress: progress, deepspeed_name="WarmupDecayLR"),
    "constant": DecayRule(lambda _: 0.0, deepspeed_name="WarmupLR"),
    # Hu et al. 2024, arXiv:2404.06395, section 4
    "wsd": DecayRule(lambda progress: progress, has_own_steps=True),
    "inverse-sqrt": DecayRule(factor=_inverse_sqrt),
    PIECEWISE: DecayRule(factor=lambda _, step, train: piecewise(train, step)),
}


def lr_factor(scheduler: Scheduler, step: int, train: Train) -> float:
    """Return the multiple of the peak rate for the update that ends `step`, of 1 … `train.steps`.

    The linear warm-up reaches the peak at `warmup_steps`. A decay reaches `min_ratio` at `train.steps`.
    """
    steps, start = train.steps or step, scheduler.warmup_steps
    rule = SCHEDULERS[scheduler.name]
    if step <= start:
        return step / start
    if rule.factor is not None:
        return rule.factor(scheduler, step, train)
    if rule.has_own_steps:
        assert scheduler.decay_steps is not None, "the launcher freezes a number"
        start = max(start, steps - scheduler.decay_steps)
    progress = max(0, step - start) / max(1, steps - start)
    return 1 - (1 - scheduler.min_ratio) * rule.decay(progress)
