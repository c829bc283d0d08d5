"""Detection of a diverged training."""

from __future__ import annotations

import math


class NonFiniteError(ArithmeticError):
    """The loss or the gradient norm is NaN or infinite: continuing would waste the devices' time."""


def require_finite(step: int, **values: float) -> None:
    """Raise a NonFiniteError that names the step and every value that is not finite."""
    non_finite = {name: value for name, value in values.items() if not math.isfinite(value)}
    if non_finite:
        figures = " and ".join(f"{name} is {value}" for name, value in non_finite.items())
        raise NonFiniteError(
            f"{figures} at step {step}; try a lower optimizer.lr, a longer scheduler.warmup_steps "
            "or optimizer.clip_norm=1.0, and resume from the checkpoint before. If "
            "environment.json says that attention is cuDNN's, try backend.attention=flash, or "
            "math with document masks"
        )
