"""A replay: steps of a run once more, as a run of its own that begins with a checkpoint from before them."""

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoscale.checkpoint.configuration import record_origin
from nanoscale.checkpoint.store import StoredCheckpoint, list_checkpoints
from nanoscale.common.errors import UserError, Violation, refuse_option
from nanoscale.config.composing.frozen import load
from nanoscale.config.resolved import ResolvedConfig, differences
from nanoscale.config.violations import shown
from nanoscale.launch.lifecycle.continuation import IDENTITY
from nanoscale.launch.request import Request
from nanoscale.runs import events
from nanoscale.runs.directory import RunDirectory, free_name


@dataclass(frozen=True)
class Replay:
    """The steps of a run to do again, and what they begin with."""

    run: RunDirectory
    first: int
    last: int
    start: StoredCheckpoint | None
    """The newest checkpoint from before the first step; None: the initial weights."""
    config: Path
    """The configuration that trained the first step."""

    @property
    def start_step(self) -> int:
        return self.start.step if self.start else 0

    def settings(self) -> dict[str, Any]:
        """Return the keys that differ from the run's: they change outputs and the end, and no number."""
        config = load(self.config)
        steps, every = self.run.checkpoint_steps(), config.checkpoint.every
        saved = [step for step in steps if self.start_step < step <= self.last]
        if not every or all(step % every for step in saved):  # none was saved by its number
            every = (saved or [0])[0]
        source = {"run.from_run": None, "run.from_step": None, "run.from_optimizer": False}
        return (source if self.start else {}) | {
            "run.root": str(self.run.path.parent),
            "run.name": free_name(self.run.path.parent, f"{self.run.name}-replay"),
            "train.log_every": 1,
            "train.stop_when.last_step": self.last,
            "train.stop_when.patience": 0,
            "train.stop_when.eval_loss": None,
            "train.on_spike": "note",
            "train.eval_tasks": [],
            "train.eval_tasks_dir": None,
            "train.eval_tasks_limit": None,
            "checkpoint.best_metric": "eval_loss",
            "train.sample_tokens": 0,
            "checkpoint.every": every,
            "checkpoint.every_minutes": None,
            "checkpoint.keep_last": None,
            "checkpoint.keep_every": None,
            "checkpoint.keep_best": 0,
            "checkpoint.upload": None,
            "checkpoint.at_end": self.last in saved,
            "logger.wandb": "off",
            "logger.mlflow": "off",
        }

    def link(self, replayed: RunDirectory) -> None:
        """Give the new run its checkpoint with the metrics until then, and the reference of its pairs."""
        if self.start is not None:
            target = replayed.checkpoint(self.start.step)
            shutil.copytree(self.start.path, target, copy_function=_link)
            record_origin(replayed, self.start)
            if self.run.metrics.is_file():  # ranks drop later lines
                shutil.copyfile(self.run.metrics, replayed.metrics)
        if self.run.references.is_file():
            _link(str(self.run.references), str(replayed.references))
        if self.run.teacher.is_dir():
            shutil.copytree(self.run.teacher, replayed.teacher, copy_function=_link)


def _link(source: str, target: str) -> None:
    """Link a file that nobody changes; copy it where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def find_replay(run: RunDirectory, steps: str) -> Replay:
    """Return the replay of `N` or `N-M`.

    Raises:
        UserError: the text names no steps of the run, or the run went back and skipped samples in them.
    """
    limit = load(run.config).train.steps
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", steps)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last <= limit:
        message = f"must be a step or a range, as in 12-20, from 1 to {limit}"
        refuse_option("--steps", steps, message, f"--steps 1-{limit}")
    before = [stored for stored in list_checkpoints(run.checkpoints) if stored.step < first]
    start = before[-1] if before else None
    start_step = start.step if start else 0
    for event in events.read(run):
        if event["kind"] == "rollback" and start_step <= event.get("step", -1) < last:
            message = (
                f"went back to step {event['step']} and skipped samples then; what it trained next is in no "
                f"checkpoint before step {first}"
            )
            raise UserError("run", f"--steps {steps}: {run.name} {message}")
    return Replay(run, first, last, start, _configuration_of(run, first))


def _configuration_of(run: RunDirectory, step: int) -> Path:
    """Return the file of the configuration that trained a step last."""
    resumed = events.starts(run)
    trained = max((number for number, begin in resumed.items() if begin < step), default=1)
    files = [run.attempt_config(number) for number in range(trained, max(resumed, default=1) + 1)]
    return next((file for file in files if file.is_file()), run.config)


def require_same_training(replay: Replay, request: Request) -> None:
    """Require that the changes of a replay leave its checkpoint and its data what they were.

    Raises:
        UserError: they would train something else.
    """
    message = "was {}, and a replay trains the same model with the same data"
    violations = [
        Violation(key, now, request.composed.source(key), message.format(shown(was)))
        for key, (was, now) in differences(load(replay.config), request.config).items()
        if key.startswith(IDENTITY) and not key.startswith("run.")
    ]
    if violations:
        raise UserError("run", "a changed value would train something else", violations)


_LAYOUT = ("parallel.", "zero.", "precision.", "backend.", "train.micro_batch", "launcher.device")
"""Beginnings of the keys that change the order of sums, and so their rounding."""


def changed_layout(replay: Replay, config: ResolvedConfig) -> list[str]:
    """Return the keys of a replay's layout that differ from the run's keys."""
    changes = differences(load(replay.config), config)
    return [key for key in changes if key.startswith(_LAYOUT) and key != "launcher.devices"]
