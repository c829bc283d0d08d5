"""The learning rate as a function of the step."""

from __future__ import annotations

import math

from nanoscale.config.schema import Scheduler


def lr_factor(scheduler: Scheduler, step: int, steps: int) -> float:
    """Return the multiple of the peak rate for the update that ends `step`, of 1 … `steps`.

    The warm-up reaches the peak at `warmup_steps`; every falling shape reaches `min_ratio` at `steps`. Cosine:
    Loshchilov & Hutter 2017, arXiv:1608.03983, eq. 5, without restarts. WSD: Hu et al. 2024, arXiv:2404.06395,
    section 4, with a linear decay.
    """
    if step <= scheduler.warmup_steps:
        return step / scheduler.warmup_steps
    if scheduler.name == "constant":
        return 1.0
    decay_start = scheduler.warmup_steps
    if scheduler.name == "wsd":
        assert scheduler.decay_steps is not None, "the launcher freezes a number"
        decay_start = max(decay_start, steps - scheduler.decay_steps)
    progress = max(0, step - decay_start) / max(1, steps - decay_start)
    decay = (1 - math.cos(math.pi * progress)) / 2 if scheduler.name == "cosine" else progress
    return 1 - (1 - scheduler.min_ratio) * decay
