"""The user's own functions after steps, evaluations and checkpoints: `on_…` of hooks.path."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from nanoscale.backends.base import Engine
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.values.hooks import PARAMETERS, function


@dataclass(frozen=True)
class StepMoment:
    """The state of the training when a callback is called, on every rank."""

    step: int
    """The optimizer steps of the run until now."""
    rank: int
    config: ResolvedConfig
    run: Path
    """The run directory."""
    modules: list[nn.Module]
    """This rank's stages of the model, with parameters in the layout's shards."""
    metrics: Mapping[str, Any] | None = None
    """The line of metrics.jsonl, in steps that are logged; after an evaluation with its losses."""
    checkpoint: Path | None = None
    """on_checkpoint: the complete checkpoint."""


@dataclass(frozen=True)
class Callbacks:
    """The functions of a job by their names; each is called by all ranks at the same point."""

    functions: dict[str, Callable[[StepMoment], Any]] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    """The values of a moment that stay."""

    def call(self, name: str, step: int, **values: Any) -> None:
        """Call a function if the job has it."""
        if name in self.functions:
            self.functions[name](StepMoment(step, **self.about, **values))


def make_callbacks(config: ResolvedConfig, run: Path, rank: int, engine: Engine) -> Callbacks:
    """Return the callbacks of a rank."""
    names = [name for name in PARAMETERS if name.startswith("on_")]
    functions = {name: it for name in names if (it := function(config, name)) is not None}
    modules = list(engine.stages.values())
    return Callbacks(functions, {"rank": rank, "config": config, "run": run, "modules": modules})
