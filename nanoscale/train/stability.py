"""Detection of a diverged training, and of a loss that jumps."""

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from nanoscale.checkpoint.store import BEFORE_SPIKE

_WINDOW, _FEWEST = 100, 20
"""The logged losses that give the spread, and the fewest that show one."""


ADVICE = (
    "; try a lower optimizer.lr, a longer scheduler.warmup_steps or optimizer.clip_norm=1.0, and resume from "
    "the checkpoint before. If environment.json says that attention is cuDNN's, try backend.attention=flash"
)


class NonFiniteError(ArithmeticError):
    """The loss or the gradient norm is NaN or infinite: continuing would waste the devices' time."""


def require_finite(step: int, **values: float) -> None:
    """Raise a NonFiniteError that names the step and every value that is not finite."""
    non_finite = {name: value for name, value in values.items() if not math.isfinite(value)}
    if non_finite:
        figures = " and ".join(f"{name} is {value}" for name, value in non_finite.items())
        raise NonFiniteError(f"{figures} at step {step}{ADVICE}")


class LossSpikeError(ArithmeticError):
    """The loss has jumped, and `train.on_spike` is not `note`."""


class ZeroGradientError(ArithmeticError):
    """The gradient norm stays at exactly 0: the training only decays its weights."""


def count_zeros(before: int, step: int, loss: float, norm: float) -> int:
    """Count the logged norms in a row that are exactly 0, unless no token has a loss; raise an error at 3."""
    count = before + 1 if norm == 0 and loss else 0
    if count == 3:
        raise ZeroGradientError(f"grad_norm is 0 in 3 logged steps up to {step}")
    return count


@dataclass
class Spikes:
    """The detection of jumps of the logged loss; after a resume the spread begins again."""

    steps: list[int] = field(default_factory=list)
    """On rank 0, the steps of the checkpoints from before the jump, which are not deleted until it is over."""
    limit: float | None = None
    """The highest loss without a jump, until the jump is over; None: there is none."""
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    calm: int = 0
    """The losses in a row that were within the limit."""

    def add(self, loss: float) -> str | None:
        """Add a logged loss; return a sentence if a jump begins with it.

        A jump is above the median by more than ten times the spread, which is 1.4826 times the median absolute
        deviation, but at least 2 % of the median and 0.05. It is over after 20 lower losses in a row.
        """
        if self.limit is None and len(self.recent) >= _FEWEST:
            middle = median(self.recent)
            spread = 1.4826 * median(abs(other - middle) for other in self.recent)
            limit = middle + 10 * max(spread, 0.02 * abs(middle), 0.05)
            if loss > limit:
                self.limit, self.calm = limit, 0
                known = f"the median of the last {len(self.recent)}"
                return f"the loss jumped to {loss:.4g}, far above {middle:.4g}, {known}"
        if self.limit is not None:
            self.calm = self.calm + 1 if loss <= self.limit else 0
            if self.calm >= _FEWEST:
                self.steps, self.limit = [], None
        if self.limit is None or loss <= self.limit:
            self.recent.append(loss)
        return None

    def in_manifest(self) -> dict[str, Any]:
        """Return what a checkpoint's manifest holds of a jump that is not over; otherwise nothing."""
        is_over = self.limit is None
        return {} if is_over else {BEFORE_SPIKE: {"steps": self.steps, "limit": self.limit}}
