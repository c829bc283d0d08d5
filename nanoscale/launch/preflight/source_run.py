"""A job that begins with the weights of another run: `run.from_run`."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from nanoscale.checkpoint import store
from nanoscale.common.errors import UserError, Violation
from nanoscale.config import parameters
from nanoscale.config.composing.frozen import load
from nanoscale.config.optimizers import keeps_average
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.values.provenance import Composed
from nanoscale.config.violations import override, refuse
from nanoscale.runs.directory import RunDirectory

KEY = "run.from_run"


def with_source_run(composed: Composed, config: ResolvedConfig) -> ResolvedConfig:
    """Return the configuration with the folder and the step of the run that it begins from, if it does.

    Raises:
        UserError: there is no such run, it has no complete checkpoint, or its tensors are of another model.
    """
    asked = config.run.from_run
    if asked is None:
        return config
    try:
        source = RunDirectory.open(Path(asked).expanduser(), Path(config.run.root))
        stored = store.find_checkpoint(source.checkpoints, config.run.from_step)
        damage = store.find_damage(stored.path, sums=False)
        violations = [] if damage else list(_misfits(source, stored, config))
    except store.DamagedCheckpointError as error:
        damage = [str(error)]
    except UserError as error:
        ways = [way for violation in error.violations for way in _ways(violation.suggestions)]
        composed.refuse(KEY, str(error), *ways, kind="run")
    if damage:
        composed.refuse(KEY, f"{stored.path} is damaged: {'; '.join(damage)}", kind="run")
    if violations:
        refuse([replace(it, source=composed.source(it.key)) for it in violations], kind="run")
    run = replace(config.run, from_run=str(source.path), from_step=stored.step)
    return replace(config, run=run)


def _ways(suggestions: tuple[str, ...]) -> Iterator[str]:
    """Yield the suggestions of a command that names a run, as overrides."""
    for text in suggestions:
        if text.startswith("--step "):
            yield override("run.from_step", int(text.removeprefix("--step ")))
        else:
            yield text if text.startswith("nanoscale ") else override(KEY, shlex.split(text)[0])


def _misfits(
    source: RunDirectory, stored: store.StoredCheckpoint, config: ResolvedConfig
) -> Iterator[Violation]:
    """Yield the reasons for which a job cannot begin from a checkpoint."""
    tensors = stored.manifest["tensors"]
    trained = load(source.config)
    if bool(trained.lora.rank) != bool(config.lora.rank):
        export = f"nanoscale checkpoints export {shlex.quote(source.reference)} --format hf"
        what = "adapters" if trained.lora.rank else "a whole model and not the adapters of lora"
        message = f"holds {what}: export it and begin from the folder, with model.init_from=FOLDER"
        yield Violation(KEY, str(source.path), "", message, (export,))
    elif config.model.source == trained.model.source == "own" and not config.lora.rank:
        yield from _other_shapes(stored, tensors, config)
    if not config.run.from_optimizer:
        return
    optimizer, before = config.optimizer, trained.optimizer
    has_other_average = keeps_average(optimizer) != keeps_average(before)
    for leaf, is_other in ("name", optimizer.name != before.name), ("ema_decay", has_other_average):
        if is_other:
            key, local, other = f"optimizer.{leaf}", getattr(optimizer, leaf), getattr(before, leaf)
            message = f"has no moments in {source.name}, which was trained with {other}"
            advice = (override(key, other), "run.from_optimizer=false")
            yield Violation(key, local, "", message, advice)


def _other_shapes(
    stored: store.StoredCheckpoint, tensors: dict[str, Any], config: ResolvedConfig
) -> Iterator[Violation]:
    needed = {
        f"model.{name}": list(each.shape) for name, each in parameters.named(config.model).items()
    }
    shapes = {name: about["shape"] for name, about in tensors.items() if name.startswith("model.")}
    names = sorted(needed.keys() | shapes.keys(), key=lambda name: (name not in needed, name))
    other = [name for name in names if needed.get(name) != shapes.get(name)]
    if other:
        name = max(other, key=lambda name: math.prod(needed.get(name, [0])))
        expected, has = needed.get(name, "no such tensor"), shapes.get(name, "no such tensor")
        count = f" and {len(other) - 1} more differ" if len(other) > 1 else ""
        message = f"is of another model: for {name} it has {has}, and this job {expected}{count}"
        yield Violation(KEY, str(stored.path), "", message)
