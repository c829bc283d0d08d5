"""Dynamic loss scaling, which keeps small fp16 gradients from underflowing.

Source: Micikevicius et al. 2018, arXiv:1710.03740, section 3.2.
"""

import math

import torch
from torch import Tensor

from nanoscale.config.schema import Precision

SMALLEST = 2.0**-14
"""The smallest normal number of fp16: gradients that overflow even with this scale have another cause."""


class LossScale:
    """The factor on the loss: halved after an overflow, doubled after `loss_scale_window` good steps in a row.

    It is kept in host memory, in fp64, as tensors that a checkpoint can fill in place. All ranks must call
    `update` with the same result: that for the gradient norm of the whole model.
    """

    def __init__(self, precision: Precision) -> None:
        self.window = precision.loss_scale_window
        self._scale = torch.tensor(precision.loss_scale, dtype=torch.float64)
        self._good_steps = torch.tensor(0)
        self._skipped_steps = torch.tensor(0)

    @property
    def scale(self) -> float:
        return self._scale.item()

    @property
    def skipped_steps(self) -> int:
        """The skipped steps of the whole training."""
        return int(self._skipped_steps)

    @property
    def exhausted(self) -> bool:
        """True if halving no longer helps: the loss or the gradients themselves are not finite."""
        return self.scale < SMALLEST

    def update(self, finite: bool) -> bool:
        """Return True if the step is to be taken, and set the scale of the next one."""
        if not finite:
            self._scale /= 2
            self._good_steps.zero_()
            self._skipped_steps += 1
            return False
        self._good_steps += 1
        if self._good_steps == self.window:
            self._good_steps.zero_()
            if math.isfinite(2 * self.scale):
                self._scale *= 2
        return True

    def figures(self) -> dict[str, float]:
        """Return the logged metrics."""
        return {"loss_scale": self.scale, "skipped_steps": self.skipped_steps}

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint holds; loading fills them in place."""
        return {
            "scale": self._scale,
            "good_steps": self._good_steps,
            "skipped_steps": self._skipped_steps,
        }
