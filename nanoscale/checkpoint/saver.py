"""The writer of checkpoints: the training thread itself, which waits, or a background thread."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nanoscale.checkpoint import sharded, store
from nanoscale.checkpoint.staging import Staging, State, in_thread
from nanoscale.checkpoint.uploader import Uploader
from nanoscale.config.schema import Checkpoint


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint."""

    path: Path
    step: int
    seconds: float
    """Seconds from the call to the complete checkpoint."""
    stall_s: float
    """The part of these seconds in which the training waited."""
    undeleted: dict[int, str]
    """Old checkpoints that could not be deleted and were not reported before: step and reason."""


class Saver:
    """A saver of one checkpoint at a time; all ranks call each of its methods at the same steps."""

    def __init__(self, workspace: Path, settings: Checkpoint, rank: int) -> None:
        self._workspace = workspace
        self._settings = settings
        self._rank = rank
        self._is_asynchronous = settings.asynchronous
        self._staging = Staging()
        # Collectives of two threads would interfere in one group.
        needs_group = self._is_asynchronous and dist.is_initialized()
        self._group = _group_of_another_thread() if needs_group else None
        self._writing: Future[Saved] | None = None
        self._stall_s = 0.0
        self._undeleted: dict[int, str] = {}
        self.open()

    def open(self) -> None:
        """Begin to upload, also after a rollback has closed the uploader."""
        target = self._settings.upload if self._rank == 0 else None
        self._uploader = Uploader(self._workspace, target) if target else None

    def prepare(self, state: Callable[[], State]) -> None:
        """Begin to allocate what the first due save in the background needs."""
        due = self._settings
        if due.asynchronous and (due.every or due.every_minutes or due.keep_best):
            self._staging.prepare(state)

    def close(self, outcome: str) -> None:
        """Wait for the uploads at the end of a training that is "completed", "stopped" or "failed"."""
        if self._uploader is not None:
            self._uploader.close(outcome)

    @property
    def failed(self) -> bool:
        """True if writing the background checkpoint has failed."""
        writing = self._writing
        return writing is not None and writing.done() and writing.exception() is not None

    def write(self, state: State, manifest: dict[str, Any]) -> Saved:
        """Write the state while the training waits.

        Raises:
            OSError: see `sharded.save`.
        """
        return self._write(state, manifest, time.perf_counter(), in_background=False)

    def begin(self, state: State, manifest: dict[str, Any]) -> Saved | None:
        """Write the present state, in the background if configured; the previous checkpoint must be finished.

        `hold` must be called before weights change again.

        Raises:
            OSError: see `sharded.save`.
        """
        assert self._writing is None
        if not self._is_asynchronous:
            return self.write(state, manifest)
        start = time.perf_counter()
        staged = self._staging.copy(state)
        self._stall_s = time.perf_counter() - start
        self._writing = in_thread(lambda: self._write(staged, manifest, start, in_background=True))
        return None

    def hold(self) -> None:
        """Wait until the state given to `begin` may change."""
        self._stall_s += self._staging.hold()

    def finished(self) -> Saved | None:
        """Return the checkpoint in progress once, as soon as it is complete."""
        if self._writing is None or not self._writing.done() or self.failed:
            return None
        return self.finish()

    def finish(self) -> Saved | None:
        """Wait for the checkpoint in progress; None if there is none.

        Raises:
            OSError: see `sharded.save`.
        """
        writing, self._writing = self._writing, None
        return None if writing is None else writing.result()

    def _write(
        self, state: State, manifest: dict[str, Any], start: float, *, in_background: bool
    ) -> Saved:
        if in_background:
            self._staging.fill()
        group = self._group if in_background else None
        path = sharded.save(self._workspace, state, manifest, group)
        best = [step for _, step in manifest.get(store.BEST, [])[: self._settings.keep_best]]
        before_spike = manifest.get(store.BEFORE_SPIKE, {}).get("steps", [])
        undeleted = self._prune([*best, *before_spike]) if self._rank == 0 else {}
        seconds = time.perf_counter() - start
        stall_s = self._stall_s if in_background else seconds
        return Saved(path, manifest["step"], seconds, stall_s, undeleted)

    def _prune(self, kept: list[int]) -> dict[int, str]:
        """Delete old checkpoints, except of the steps in `kept`; return new failures to delete one."""
        settings = self._settings
        if self._uploader is not None:
            self._uploader.wake()
            kept = [*kept, *filter(None, [self._uploader.current])]
        pruned = store.prune(self._workspace, settings.keep_last, settings.keep_every, kept)
        failed = pruned.failed
        new = {step: reason for step, reason in failed.items() if step not in self._undeleted}
        self._undeleted |= new
        return new


def _group_of_another_thread() -> dist.ProcessGroup:
    """Create a group of all ranks for the collectives of a second thread, in parallel with the default group's.

    Before torch 2.13 the flight recorder adds a group to its table at the group's first collective, without a
    lock, while the other thread reads the table. So the first collective runs here, while there is one thread.
    (On CPUs the recorder is off: see `process_group.join`.)
    """
    group = dist.new_group(backend="gloo")
    assert group is not None
    if torch.__version__ < "2.13":
        dist.all_reduce(torch.zeros(1), group=group)
    return group
