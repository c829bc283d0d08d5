"""Saving and loading a training state that is sharded over all ranks, in any layout.

The files are torch.distributed.checkpoint's; `store` publishes all of them or none.
"""

import errno
import math
import os
import shlex
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem

from nanoscale.checkpoint import store
from nanoscale.checkpoint.reader import Reader, result_of
from nanoscale.checkpoint.staging import State
from nanoscale.checkpoint.store import StoredCheckpoint
from nanoscale.common.errors import LostPeerError, UserError, Violation
from nanoscale.common.json_text import Json
from nanoscale.parallel import process_group
from nanoscale.runs import fence
from nanoscale.runs.directory import checkpoint_path
from nanoscale.runs.fence import FencedError

Description = dict[str, Json]
T = TypeVar("T")
Report = Callable[[str], None]
"""A function that shows a sentence to the user."""

_BYTES_A_SHARD = 2048
"""Bytes per tensor and rank of torch's archive, its metadata and our manifest, in addition to the data."""


def save(
    workspace: Path, state: State, about: Json, group: dist.ProcessGroup | None = None
) -> Path:
    """Write a checkpoint with all ranks; it is complete and published when this returns.

    Args:
        workspace: the workspace of the run's attempt.
        about: the content of the manifest, with at least `step`.
        group: a group of all ranks, for another thread than the one that trains.

    Raises:
        OSError: it does not fit on the disk, or a write failed; no checkpoint has appeared then.
        FencedError: the run has continued without this attempt; no checkpoint has appeared.
    """
    rank = process_group.rank()
    staging = store.staging_path(workspace, about["step"])
    final = checkpoint_path(workspace.parent, about["step"])
    if process_group.broadcast(final.exists, group):
        return final
    tensors = describe_all(state, group)
    with fence.explained(workspace):
        _on_all_ranks(lambda: _prepare(staging, tensors), rank == 0, group)
        writer = _Writer(staging, sync_files=True, overwrite=False)
        with _torch_errors_explained(staging):
            alone = not dist.is_initialized()
            dcp.save(state, storage_writer=writer, process_group=group, no_dist=alone)
        sums = _on_all_ranks(lambda: store.sum_files(_written_by(rank, staging)), True, group)
        all_sums = {
            name: entry for by_name in filter(None, sums) for name, entry in by_name.items()
        }
        manifest = about | {"tensors": tensors}
        _on_all_ranks(lambda: store.publish(staging, manifest, all_sums), rank == 0, group)
    return final


class _Writer(FileSystemWriter):
    """torch's writer of a rank's files, which raises the OSError of a failed write."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.fs = self._files = _Files()

    def write_data(self, *args: Any) -> Any:
        try:
            return super().write_data(*args)
        except Exception as error:
            if self._files.failed is not None:  # torch's archive may report only a short write
                raise self._files.failed from error
            raise


class _Files(FileSystem):
    """A file system that opens a checkpoint's files and remembers the first failed write.

    torch would create a missing folder and its parents, which would bypass the fence.
    """

    failed: OSError | None = None

    def mkdir(self, path: Any) -> None:
        """Do nothing: the first rank has created the folder."""

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            write = stream.write

            def noted(data: Any) -> int:
                try:
                    return write(data)
                except OSError as error:
                    self.failed = self.failed or error
                    raise

            stream.write = noted
            yield stream
            # torch synchronizes its index before the last bytes of it are flushed.
            if not stream.closed:
                stream.flush()
                os.fsync(stream.fileno())


def load_newest(workspace: Path, state: State, report: Report = lambda _: None) -> Json | None:
    """Fill `state` in place from the newest complete checkpoint; return its manifest, or None if there are
    none.

    Newer, damaged ones are set aside once a complete one was loaded, each with a `report`.

    Raises:
        UserError: there are checkpoints, but no complete one, or none fits the model; nothing was renamed.
        FencedError: the run has continued without this attempt.
    """
    damaged: list[tuple[StoredCheckpoint, list[str]]] = []
    stored = process_group.broadcast(lambda: store.list_checkpoints(workspace.parent))
    for candidate in reversed(stored):
        damage = _find_damage(candidate)
        if damage:
            damaged.append((candidate, damage))
            continue
        manifest = candidate.manifest
        available = _fitting(candidate, state)
        for newer, newer_damage in damaged:
            _set_aside(workspace, newer, newer_damage, report)
        _read(candidate, available)
        return manifest
    if damaged:
        folder = workspace.parent
        causes = " · ".join(f"{it.path.name}: {'; '.join(damage)}" for it, damage in damaged)
        command = f"nanoscale train --config {shlex.quote(str(folder.parent / 'config.yaml'))}"
        text = f"no checkpoint in {folder} is complete: {causes}. To start again: {command}"
        raise UserError("checkpoint", text)
    return None


def load(stored: StoredCheckpoint, state: State) -> None:
    """Fill `state` in place from one checkpoint, which `require_whole` has read.

    Raises:
        UserError: it is of another model or optimizer.
    """
    _read(stored, _fitting(stored, state))


def require_whole(stored: StoredCheckpoint) -> None:
    """Compare every byte of a checkpoint with its sums, each rank a part. Raises UserError if one differs."""
    if damage := _find_damage(stored):
        raise UserError("checkpoint", f"{stored.path} is damaged: {'; '.join(damage)}")


def _fitting(stored: StoredCheckpoint, state: State) -> State:
    """Return the tensors to load, which the checkpoint has and of the same shapes."""
    tensors = stored.manifest["tensors"]
    # Tensors that the checkpoint may lack keep their initial values.
    available = {
        name: value for name, value in state.items() if name in tensors or not _is_optional(name)
    }
    _require_same_tensors(stored, tensors, describe_all(available))
    return available


def _set_aside(
    workspace: Path, checkpoint: StoredCheckpoint, damage: list[str], report: Report
) -> None:
    new_path = _on_all_ranks(
        lambda: store.set_aside(workspace, checkpoint), process_group.rank() == 0
    )[0]
    assert new_path is not None
    report(
        f"{checkpoint.path.name} is damaged ({'; '.join(damage)}) and is now {new_path.name}; the run "
        f"resumes from an earlier checkpoint. To undo that, stop the run and type: {store.undo(new_path)}"
    )


def load_weights(stored: StoredCheckpoint, state: State) -> Json:
    """Fill the tensors of `state` in place, whatever their dtype, and nothing else; return the manifest.

    The weights are the result of the training: their averages, if the checkpoint has them.

    Only the sizes of files are compared with the manifest; `find_damage` checks their sums.

    Raises:
        UserError: a file is missing or truncated, or the checkpoint belongs to another model.
    """
    damage = process_group.broadcast(lambda: store.find_damage(stored.path, sums=False))
    if damage:
        raise UserError("checkpoint", f"{stored.path} is damaged: {'; '.join(damage)}")
    manifest = stored.manifest
    prefixes = {name.partition(".")[0] for name in state}
    stored_tensors = manifest["tensors"].items()
    needed = {name: about for name, about in stored_tensors if name.partition(".")[0] in prefixes}
    _require_same_tensors(stored, needed, describe_all(state))
    _read(stored, {result_of(name, manifest["tensors"]): value for name, value in state.items()})
    return manifest


def describe_all(state: State, group: dist.ProcessGroup | None = None) -> Description:
    """Return shape and dtype of every tensor of the model, on all pipeline stages."""
    by_rank = process_group.gather(describe(state), group)
    return dict(sorted(item for descriptions in by_rank for item in descriptions.items()))


def describe(state: State) -> Description:
    """Return shape and dtype of every tensor of this rank, whole, by name."""
    return {
        name: {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
        for name, value in sorted(state.items())
    }


def _prepare(staging: Path, tensors: Description) -> None:
    size = sum(
        math.prod(description["shape"]) * getattr(torch, description["dtype"]).itemsize
        for description in tensors.values()
    )
    overhead = _BYTES_A_SHARD * len(tensors) * process_group.world_size()
    store.require_space(staging.parent, size + overhead)
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()


def _written_by(rank: int, staging: Path) -> list[Path]:
    files = sorted(staging.glob(f"__{rank}_*"))
    return [*files, staging / ".metadata"] if rank == 0 else files


def _find_damage(candidate: StoredCheckpoint) -> list[str]:
    rank, world_size = process_group.rank(), process_group.world_size()
    damage_by_rank = process_group.gather(store.find_damage(candidate.path, rank, world_size))
    return sorted({sentence for rank_damage in damage_by_rank for sentence in rank_damage})


def _read(candidate: StoredCheckpoint, state: State) -> None:
    reader = Reader(candidate.path)
    with _torch_errors_explained(candidate.path):
        dcp.load(state, storage_reader=reader, no_dist=not dist.is_initialized())


@contextmanager
def _torch_errors_explained(path: Path) -> Iterator[None]:
    """Turn torch's BaseException for a failed write or read into the OSError of the failed rank.

    On the other ranks it becomes the error for a lost peer. A warning of torch about a missing process group
    is suppressed: it is intended here.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or unini")
        try:
            yield
        except CheckpointException as failed:
            local_rank = process_group.rank()
            rank = local_rank if local_rank in failed.failures else min(failed.failures)
            error, _ = failed.failures[rank]
            number, reason = errno.EIO, f"{os.strerror(errno.EIO)}: {error}"
            if isinstance(error, OSError) and error.errno:
                number, reason = error.errno, error.strerror or str(error)
            text = f"{reason} (rank {rank}, in {path})"
            if rank == local_rank:
                raise OSError(number, text) from error
            raise LostPeerError(number, f"a peer was lost: {text}") from error


def _is_optional(name: str) -> bool:
    """True if a run in another precision does not need the tensor."""
    return name.startswith("loss_scale.")


def _require_same_tensors(
    candidate: StoredCheckpoint, stored: Description, needed: Description
) -> None:
    """Raise a readable error if a checkpoint belongs to another model, before torch does in its own terms."""
    stored_shapes = {
        name: description["shape"]
        for name, description in stored.items()
        if name in needed or not _is_optional(name)
    }
    shapes = {name: description["shape"] for name, description in needed.items()}
    violations = [
        Violation(
            name,
            shapes.get(name, "absent"),
            candidate.path.name,
            f"the checkpoint has {stored_shapes.get(name, 'no such tensor')}",
        )
        for name in sorted(stored_shapes.keys() | shapes.keys())
        if stored_shapes.get(name) != shapes.get(name)
    ]
    if violations:
        message = f"{candidate.path} was saved with another model or optimizer than that of the configuration"
        raise UserError("checkpoint", message, violations[:8])


def _on_all_ranks(
    action: Callable[[], T], participates: bool, group: dist.ProcessGroup | None = None
) -> list[T | None]:
    """Run `action` on some ranks and wait for all; if one raises, every other rank reports a lost peer."""
    result: T | None = None
    error: OSError | None = None
    if participates:
        try:
            result = action()
        except OSError as caught:
            error = caught
    outcomes = process_group.gather((result, error), group)
    for rank, (_, failed) in enumerate(outcomes):
        if isinstance(failed, FencedError):
            raise failed
        if failed is not None:
            raise error or LostPeerError(failed.errno, f"a peer was lost: {failed} (rank {rank})")
    return [value for value, _ in outcomes]
