"""The checkpoints of a training: the progress that a manifest holds, and the events of saved ones."""

from __future__ import annotations

import shlex
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from nanoscale.backends.base import Engine
from nanoscale.checkpoint import configuration, store
from nanoscale.checkpoint.memory_writer import MemoryWriter
from nanoscale.checkpoint.saver import Saved, Saver
from nanoscale.common.units import duration
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.runs.directory import checkpoint_path
from nanoscale.runs.events import Note
from nanoscale.runs.memory_order import read_order as memory_order
from nanoscale.train.callbacks import Callbacks
from nanoscale.train.evaluations import Evaluations
from nanoscale.train.guard import require_equal_replicas
from nanoscale.train.stability import Spikes


@dataclass
class Progress:
    """The progress of the training: the state to resume from, besides tensors."""

    step: int = 0
    consumed_samples: int = 0
    base: str | None = None
    """The fingerprint of the frozen weights with lora, which no checkpoint holds."""
    evaluations: Evaluations = field(default_factory=Evaluations)
    spikes: Spikes = field(default_factory=Spikes)


@dataclass
class CheckpointWriter:
    """A writer of a training's checkpoints; all ranks call each of its methods at the same steps."""

    workspace: Path
    config: ResolvedConfig
    engine: Engine
    data: str
    """The fingerprint of the data."""
    progress: Progress
    rank: int
    note: Note
    callbacks: Callbacks
    memory: MemoryWriter | None = None
    """The writer of checkpoints in memory, of the training before a rollback."""

    def __post_init__(self) -> None:
        self.saver = Saver(self.workspace, self.config.checkpoint, self.rank)
        self.engine.before_update(self.saver.hold)
        every = self.config.checkpoint.memory_every
        if self.memory is None and every and (order := memory_order()):
            self.memory = MemoryWriter(order, self.rank, partial(self.note, "memory"))
            self.engine.before_update(self.memory.hold)
            self.engine.before_norm = self.memory.settle
        self.saved_step = self.compared_step = self.progress.step
        self.remembered_step = 0

    def save(self, *, waits: bool, by_time: bool) -> None:
        """Write a checkpoint of this step; old ones are deleted.

        Args:
            waits: True if the training waits until it is complete.
            by_time: True if it is saved only because of `checkpoint.every_minutes`.

        Raises:
            OSError: this checkpoint, or the previous one, could not be written.
            FencedError: the run has continued without this rank's attempt.
        """
        progress = self.progress
        manifest = {
            **self._progress(),
            "world_size": self.config.world_size,
            "time": time.time(),
            **({store.BY_TIME: True} if by_time else {}),
            configuration.IN_MANIFEST: configuration.values(self.config),
        }
        self.finish()
        write = self.saver.write if waits else self.saver.begin
        self.report(write(self.engine.state(), manifest))
        self.saved_step = progress.step

    def remember(self) -> None:
        """Write a checkpoint of this step into the hosts' memory, while the training continues.

        Raises:
            SharedMemoryError: the shared memory is too small.
        """
        if self.memory is not None and self.remembered_step != self.progress.step:
            self.memory.begin(self.engine.state(), self._progress())
            self.remembered_step = self.progress.step

    def _progress(self) -> dict[str, Any]:
        progress = self.progress
        return {
            "step": progress.step,
            "consumed_samples": progress.consumed_samples,
            "tokens": progress.consumed_samples * self.config.train.seq_len,
            "data": self.data,
            **progress.evaluations.in_manifest(progress.step),
            **progress.spikes.in_manifest(),
            **({"base": progress.base} if progress.base else {}),
        }

    def finish(self) -> None:
        """Wait for the checkpoint in progress, and report it."""
        self.report(self.saver.finish())

    def report(self, saved: Saved | None) -> None:
        """Record the events of a complete checkpoint, if there is one, and call the user's function."""
        if saved is None:
            return
        message = f"{saved.path.name} saved in {duration(saved.seconds)}"
        if saved.stall_s < saved.seconds:
            message += f", of which the training waited {duration(saved.stall_s)}"
        self.note(
            "checkpoint", message, step=saved.step, seconds=saved.seconds, stall_s=saved.stall_s
        )
        self.callbacks.call("on_checkpoint", saved.step, checkpoint=saved.path)
        for step, reason in saved.undeleted.items():
            path = checkpoint_path(saved.path.parent, step)
            self.note(
                "undeleted",
                f"{path.name} is no longer needed and could not be deleted ({reason}); the training "
                f"continues. To delete it: rm -r {shlex.quote(str(path))}",
                step=step,
            )

    def keep_before_jump(self, jump: str) -> None:
        """Record a jump of the loss, and keep the checkpoints from before it."""
        self.finish()
        if self.rank == 0:
            stored = store.list_checkpoints(self.workspace.parent)
            self.progress.spikes.steps = [checkpoint.step for checkpoint in stored]
        self.note("spike", f"{jump}; the checkpoints from before it are kept")

    def compare_replicas(self) -> None:
        """Raise an error on every rank if ranks differ in what they hold equally, once a step."""
        if self.compared_step != self.progress.step:
            require_equal_replicas(self.engine, self.progress.step)
            self.compared_step = self.progress.step
