"""The cause of a loss or a gradient that is not finite: the steps since the last checkpoint once more, with
checks of every module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nanoscale.backends.base import Engine
from nanoscale.backends.gradients import local_tensor
from nanoscale.models.moe import is_recomputed
from nanoscale.parallel import process_group
from nanoscale.train.loop import Training

MOST_STEPS = 200
"""The most steps that are repeated."""
Place = tuple[int, int, str]
"""0 or 1 for forward or backward, the number of the pass through the module, and a sentence."""


@dataclass
class Checks:
    """The first result of a rank that was not finite."""

    first: Place | None = None
    passes: dict[str, int] = field(default_factory=dict)
    """The forward passes of each module so far."""

    @contextmanager
    def watching(self, engine: Engine) -> Iterator[None]:
        """Check the results of all modules, and the gradients of these results."""
        hooks = [
            module.register_forward_hook(partial(self._check, name))
            for stage in engine.stages.values()
            for name, module in stage.named_modules()
            if name
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _check(self, name: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return
        if is_recomputed():
            return
        number = self.passes[name] = self.passes.get(name, 0) + 1
        kind = f"`{name}` ({type(module).__name__})"
        if self.first is None and not output.isfinite().all():
            made_here = all(_is_finite(value) for value in inputs)
            origin = "" if made_here else ", whose input was not finite either"
            self.first = (0, number, f"the result of {kind}{origin}")
        if output.requires_grad:
            output.register_hook(partial(self._check_gradient, kind, number))

    def _check_gradient(self, kind: str, number: int, gradient: Tensor) -> None:
        if self.first is None and not gradient.isfinite().all():
            self.first = (1, number, f"the gradient of the result of {kind}")


def _is_finite(value: Any) -> bool:
    floats = isinstance(value, Tensor) and value.is_floating_point()
    return not floats or bool(value.isfinite().all())


def find_cause(training: Training, last_step: int) -> str | None:
    """Train up to `last_step` again, and return a sentence about the first result that is not finite.

    The training has the state of an earlier step. None: everything was finite this time, so the cause is
    outside of the modules, or the computation does not repeat exactly.
    """
    since_log = training.config.train.log_every
    while training.progress.step < last_step:
        checks = Checks()
        damaged_weight = _damaged_weight(training.engine)
        if training.progress.step >= last_step - since_log:
            # The insides of compiled blocks cannot be watched.
            with checks.watching(training.engine), torch.compiler.set_stance("force_eager"):
                training.advance()
        else:
            training.advance()
        step = training.progress.step
        found = process_group.gather((damaged_weight, checks.first))
        damaged = next((name for name, _ in found if name), None)
        if damaged is not None:
            return f"`{damaged}` was not finite before step {step}: the update of step {step - 1} made it so"
        places = sorted(place for _, place in found if place)
        if places:
            _, number, sentence = places[0]
            return f"the first of its causes is {sentence}, in micro batch {number} of step {step}"
    return None


@torch.no_grad()
def _damaged_weight(engine: Engine) -> str | None:
    """Return the first of this rank's weights that is not finite."""
    for name, value in engine.state().items():
        if name.startswith("model.") and not _is_finite(local_tensor(value)):
            return name.removeprefix("model.")
    return None
