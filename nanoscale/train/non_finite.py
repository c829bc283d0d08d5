"""The cause of a loss or a gradient that is not finite: the steps since the last checkpoint once more, with
checks of every module."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nanoscale.backends.base import Engine
from nanoscale.backends.gradients import local_tensor
from nanoscale.common.units import numbered
from nanoscale.models.moe import is_recomputed
from nanoscale.parallel import process_group
from nanoscale.train.loop import Training

MOST_STEPS = 200
"""The most steps that are repeated."""
Place = tuple[int, int, int, int, str]
"""The order in which a number that is not finite spreads: 0 or 1 for forward or backward, the micro batch, the
model's stage (negative in backward), the number of the result in the stage's pass; and a sentence."""


@dataclass
class Checks:
    """The first result of a rank that was not finite."""

    first: Place | None = None
    passes: Counter[int] = field(default_factory=Counter)
    """The micro batches that have entered each stage, whose halves a block may run one by one."""
    results: Counter[tuple[int, int, int]] = field(default_factory=Counter)
    """The checked results of each pass through a stage, by the first three numbers of their `Place`."""

    @contextmanager
    def watching(self, engine: Engine) -> Iterator[None]:
        """Check the results of all modules, and the gradients of these results."""
        hooks = [
            stage.register_forward_pre_hook(lambda *_, at=number: self.passes.update([at]))
            for number, stage in engine.stages.items()
        ]
        hooks += [
            module.register_forward_hook(partial(self._check, number, name))
            for number, stage in engine.stages.items()
            for name, module in stage.named_modules()
            if name
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _check(
        self, stage: int, name: str, module: nn.Module, inputs: tuple[Any, ...], output: Any
    ) -> None:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return
        if is_recomputed():
            return
        number, kind = self.passes[stage], f"`{name}` ({type(module).__name__})"
        made_here = all(_is_finite(value) for value in inputs)
        origin = "" if made_here else ", whose input was not finite either"
        self._note((0, number, stage), output, f"the result of {kind}{origin}")
        if output.requires_grad:
            text = f"the gradient of the result of {kind}"
            output.register_hook(lambda gradient: self._note((1, number, -stage), gradient, text))

    def _note(self, of_pass: tuple[int, int, int], values: Tensor, sentence: str) -> None:
        self.results[of_pass] += 1
        if self.first is None and not values.isfinite().all():
            self.first = (*of_pass, self.results[of_pass], sentence)


def _is_finite(value: Any) -> bool:
    floats = isinstance(value, Tensor) and value.is_floating_point()
    return not floats or bool(value.isfinite().all())


def find_cause(training: Training, last_step: int) -> tuple[str, list[int]] | None:
    """Train up to `last_step` again; return a sentence about the first result that is not finite, and ranks.

    The training has the state of an earlier step. None: everything was finite this time, so the cause is
    outside of the modules, or the computation does not repeat exactly.
    """
    since_log = training.config.train.log_every
    while training.progress.step < last_step:
        checks = Checks()
        weights = (it for it in training.engine.state().items() if it[0].startswith("model."))
        wrong = (name for name, value in weights if not _is_finite(local_tensor(value)))
        damaged_weight = next(wrong, "").removeprefix("model.")
        if training.progress.step >= last_step - since_log:
            # The insides of compiled blocks cannot be watched.
            with checks.watching(training.engine), torch.compiler.set_stance("force_eager"):
                training.advance()
        else:
            training.advance()
        step = training.progress.step
        found = process_group.gather((damaged_weight, checks.first))
        if damaged := next((name for name, _ in found if name), None):
            ranks = [rank for rank, (name, _) in enumerate(found) if name == damaged]
            text = f"`{damaged}` was not finite before step {step}: the update of step {step - 1} made it so"
            return text + on_ranks(ranks), ranks
        places = [place for _, place in found if place]
        if places:
            first = min(places)
            ranks = [rank for rank, (_, place) in enumerate(found) if place == first]
            when = f"in micro batch {first[1]} of step {step}{on_ranks(ranks)}"
            return f"the first of its causes is {first[-1]}, {when}", ranks
    return None


def on_ranks(ranks: Sequence[int]) -> str:
    """Return ` on rank 3`; "" for all ranks."""
    return f" on {numbered('rank', ranks)}" if len(ranks) < process_group.world_size() else ""
