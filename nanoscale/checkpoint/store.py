"""Checkpoints on disk: complete or absent, with a checksum of every byte. Imports no torch.

A checkpoint is a folder `step-<8 digits>` with a `manifest.json` that records the size and the XXH3-128 sum of
every other file in it, and a sum of itself. It is written in the workspace of the run's attempt and published
by one rename. Every other change here is also a rename out of this workspace or into it, which fails once the
run has continued without the attempt; nanoscale/runs/fence.py explains why that is enough.
"""

import errno
import json
import os
import re
import shlex
import shutil
import stat
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from nanoscale.checkpoint import metadata
from nanoscale.checkpoint.metadata import MetadataError
from nanoscale.common.errors import UserError, Violation
from nanoscale.common.json_text import Json, parse
from nanoscale.common.units import byte_size
from nanoscale.runs import fence
from nanoscale.runs.directory import (
    checkpoint_folders,
    checkpoint_path,
    file_sum,
    path_of_damaged,
    sync_folder,
)

MANIFEST = "manifest.json"
FORMAT = 1
EVAL_LOSS = "eval_loss"
"""A key of a manifest: the loss of an evaluation at its step."""
BEST = "best"
"""A key of a manifest: the lowest evaluation losses until its step, each with its step, the lowest first."""
BEFORE_SPIKE = "before_spike"
"""A key of a manifest: the checkpoints from before a jump of the loss that is not over, and its limit."""
BY_TIME = "by_time"
"""A key of a manifest; true in a checkpoint that was saved only because of checkpoint.every_minutes."""
_SET_ASIDE = re.compile(r"damaged-(step-(\d{8,}))(?:-\d+)?")
_READ_BYTES = 1 << 20
_TRANSIENT_ERRORS = frozenset(
    getattr(errno, name)
    for name in (
        *("EIO", "EREMOTEIO", "ESTALE", "ETIMEDOUT", "EAGAIN", "ENOTCONN", "ESHUTDOWN"),
        *("ECONNRESET", "ECONNABORTED", "EHOSTDOWN", "EHOSTUNREACH", "ENETDOWN", "ENETUNREACH"),
    )
    if hasattr(errno, name)
)
"""Errors of a read from a network disk that may not occur in another attempt."""
RETRY_AFTER_S = (1.0, 3.0, 10.0)
"""The waits before each further attempt."""
T = TypeVar("T")


class DamagedCheckpointError(Exception):
    """A checkpoint's manifest cannot be trusted; the text names the file."""


@dataclass(frozen=True)
class StoredCheckpoint:
    """A published checkpoint; `find_damage` checks whether it is still complete."""

    path: Path
    step: int

    @property
    def manifest(self) -> Json:
        return read_manifest(self.path)


def staging_path(workspace: Path, step: int) -> Path:
    """Return the folder in which the ranks write a checkpoint before it is published."""
    return workspace / f"writing-step-{step:08d}"


def list_checkpoints(folder: Path) -> list[StoredCheckpoint]:
    """List the published checkpoints of a run's `checkpoints/`, by step."""
    return [StoredCheckpoint(path, step) for step, path in checkpoint_folders(folder)]


def list_set_aside(folder: Path) -> list[StoredCheckpoint]:
    """List the damaged checkpoints that were renamed, by name."""
    matches = ((path, _SET_ASIDE.fullmatch(path.name)) for path in sorted(folder.glob("damaged-*")))
    return [StoredCheckpoint(path, int(match[2])) for path, match in matches if match]


def undo(damaged: Path) -> str:
    """Return the command that restores a checkpoint that was set aside."""
    match = _SET_ASIDE.fullmatch(damaged.name)
    assert match is not None, damaged
    return f"mv {shlex.quote(str(damaged))} {shlex.quote(str(damaged.with_name(match[1])))}"


def find_checkpoint(folder: Path, step: int | None) -> StoredCheckpoint:
    """Return the checkpoint of a step, or the newest.

    Raises:
        UserError: there is none.
    """
    stored = list_checkpoints(folder)
    if step is None and stored:
        return stored[-1]
    for candidate in stored:
        if candidate.step == step:
            return candidate
    message = f"there is no checkpoint{'' if step is None else f' of step {step}'}"
    steps = tuple(f"--step {candidate.step}" for candidate in stored)
    damaged = [it.path for it in list_set_aside(folder) if step in (None, it.step)]
    if damaged:
        newest = damaged[-1]
        message += f" ({newest.name} was set aside as damaged; to undo that: {undo(newest)})"
    violation = Violation(str(folder), step, "command line", message, steps)
    raise UserError("checkpoint", f"{message} in {folder}", [violation])


def require_space(folder: Path, size: int) -> None:
    """Raise an OSError before anything is written if `size` bytes would not fit."""
    free = shutil.disk_usage(folder).free
    if free < size:
        what = f"{byte_size(free)} are free in {folder}; nothing was written"
        raise OSError(errno.ENOSPC, f"no space left for a checkpoint of {byte_size(size)}: {what}")


def publish(staging: Path, manifest: Json, sums: dict[str, Json]) -> Path:
    """Publish a checkpoint, and let `latest` point to it, after all its files are on disk.

    `sums` is the result of `sum_files` for all files in `staging`.

    Raises:
        FencedError: the run has continued without this attempt.
    """
    workspace, step = staging.parent, manifest["step"]
    text = render_manifest(manifest | {"format": FORMAT, "files": dict(sorted(sums.items()))})
    with fence.explained(workspace):
        with (staging / MANIFEST).open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(staging)
        final = checkpoint_path(workspace.parent, step)
        staging.rename(final)
        sync_folder(final.parent)
        point_latest(workspace, final)
    return final


def point_latest(workspace: Path, target: Path | None) -> None:
    """Point the link `latest` to a checkpoint, or remove it."""
    link, temporary = workspace.parent / "latest", workspace / "latest"
    temporary.unlink(missing_ok=True)
    if target is not None:
        temporary.symlink_to(target.name)
        temporary.rename(link)
        sync_folder(link.parent)
    elif link.is_symlink():
        link.rename(temporary)


@dataclass(frozen=True)
class Pruned:
    """The deleted checkpoints of a run, by step."""

    deleted: list[int]
    failed: dict[int, str]
    """Checkpoints that could not be deleted, with the reason."""


def prune(
    workspace: Path, keep_last: int | None, keep_every: int | None, best: Collection[int] = ()
) -> Pruned:
    """Delete checkpoints that are neither among the newest `keep_last` nor at a multiple of `keep_every`, nor
    of a step in `best`.

    `keep_last=None` deletes only checkpoints that were saved by time, once there is a newer one.

    Raises:
        FencedError: the run has continued without this attempt.
    """
    stored = list_checkpoints(workspace.parent)
    return delete(workspace, obsolete(stored, keep_last, keep_every, best))


def obsolete(
    stored: list[StoredCheckpoint],
    keep_last: int | None,
    keep_every: int | None,
    best: Collection[int],
) -> list[StoredCheckpoint]:
    """Return the checkpoints that `prune` deletes; `stored` is in the order of steps."""
    if keep_last is None:  # every save has checked the one before it, so one is enough
        old = [checkpoint for checkpoint in stored[-2:-1] if _saved_by_time(checkpoint)]
    else:
        old = stored[:-keep_last]
    others = (it for it in old if not (keep_every and it.step % keep_every == 0))
    return [checkpoint for checkpoint in others if checkpoint.step not in best]


def lowest_losses(stored: Iterable[StoredCheckpoint], count: int) -> list[int]:
    """Return the steps of the checkpoints with the lowest evaluation losses, the lowest first."""
    losses = ((checkpoint.manifest.get(EVAL_LOSS), checkpoint.step) for checkpoint in stored)
    known = sorted((loss, step) for loss, step in losses if loss is not None)
    return [step for _, step in known[:count]]


def delete(workspace: Path, checkpoints: Iterable[StoredCheckpoint]) -> Pruned:
    """Delete checkpoints. Raises FencedError if the run has continued without the attempt."""
    pruned = Pruned([], {})
    for checkpoint in checkpoints:
        try:
            with fence.explained(workspace):
                # Rename first, so that a half-deleted one is never mistaken for a checkpoint.
                temporary = workspace / f"deleting-{checkpoint.path.name}"
                checkpoint.path.rename(temporary)
                shutil.rmtree(temporary)
        except fence.FencedError:
            raise
        except OSError as error:
            pruned.failed[checkpoint.step] = error.strerror or str(error)
        else:
            pruned.deleted.append(checkpoint.step)
    return pruned


def _saved_by_time(checkpoint: StoredCheckpoint) -> bool:
    try:
        return bool(checkpoint.manifest.get(BY_TIME))
    except (DamagedCheckpointError, OSError):
        return False  # kept for inspection


def set_aside(workspace: Path, checkpoint: StoredCheckpoint) -> Path:
    """Rename a damaged checkpoint, so that it is ignored but can be inspected.

    Raises:
        FencedError: the run has continued without this attempt.
    """
    folder = checkpoint.path.parent
    target = path_of_damaged(checkpoint.path)
    with fence.explained(workspace):
        checkpoint.path.rename(workspace / target.name)
        (workspace / target.name).rename(target)
        remaining = list_checkpoints(folder)
        point_latest(workspace, remaining[-1].path if remaining else None)
    return target


def find_damage(path: Path, index: int = 0, count: int = 1, *, sums: bool = True) -> list[str]:
    """List the damage of a checkpoint, one sentence per file; empty if it is complete.

    Several processes can divide the reading: each passes its share of the files. Without `sums` files are not
    read, and a flipped bit is not detected. A transient read error counts only if it repeats.
    """
    try:
        manifest = read_manifest(path)
    except DamagedCheckpointError as error:
        return [str(error)]
    files = manifest["files"]
    damage = []
    if index == 0:
        present = {file.name for file in path.iterdir()} - {MANIFEST}
        damage += [f"{name}: not in the manifest" for name in sorted(present - set(files))]
        damaged_name = _SET_ASIDE.fullmatch(path.name)
        name = damaged_name[1] if damaged_name else path.name
        if checkpoint_path(path.parent, manifest["step"]).name != name:
            damage.append(f"{MANIFEST}: belongs to step {manifest['step']}")
    for name in sorted(files)[index::count]:
        if Path(name).name != name:
            damage.append(f"{MANIFEST}: names {name!r}, which is not in the checkpoint's folder")
            continue
        damage += _file_damage(path / name, files, sums, patient=not damage)
    return damage


def sum_files(paths: Iterable[Path]) -> dict[str, Json]:
    """Return size in bytes and XXH3-128 sum of each file, by name."""
    return {path.name: {"bytes": path.stat().st_size, "xxh3_128": file_sum(path)} for path in paths}


def render_manifest(manifest: Json) -> str:
    """Return a manifest as text, with the sum of its own content."""
    import xxhash

    content_sum = xxhash.xxh3_128_hexdigest(json.dumps(manifest, indent=1).encode())
    return json.dumps(manifest | {"sum": content_sum}, indent=1) + "\n"


def read_manifest(path: Path) -> Json:
    """Read the manifest of a checkpoint folder.

    Raises:
        DamagedCheckpointError: it is missing, or differs from the written bytes.
    """
    file = path / MANIFEST
    try:
        text = _retried(lambda: file.read_text("utf-8"))
        manifest = parse(text)
        manifest.pop("sum")
        has_types = type(manifest["step"]) is int and type(manifest["files"]) is dict
        is_complete = has_types and render_manifest(manifest) == text
    except FileNotFoundError:
        raise DamagedCheckpointError(f"{MANIFEST}: missing") from None
    except PermissionError:
        raise  # it may well be complete
    except OSError as error:
        raise DamagedCheckpointError(f"{MANIFEST}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, AttributeError, TypeError):
        is_complete = False
    if not is_complete:
        raise DamagedCheckpointError(f"{MANIFEST}: its checksum does not match its content")
    if manifest.get("format") != FORMAT:
        raise DamagedCheckpointError(f"{MANIFEST}: format {manifest.get('format')} is not {FORMAT}")
    return dict(manifest)


def _index_problem(file: Path, files: Json) -> str | None:
    """Return a problem of the index of tensors; its bytes match the recorded checksum."""
    try:
        tensors = metadata.read(file).values()
    except MetadataError as error:
        return str(error)
    for shard in (shard for tensor in tensors for shard in tensor.shards):
        if shard.start + shard.length > files.get(shard.file, {"bytes": -1})["bytes"]:
            return f"names bytes beyond the end of {shard.file!r}"
    return None


def _file_damage(file: Path, files: Json, sums: bool, patient: bool) -> list[str]:
    """Return the damage of a file; with `patient`, a transient read error counts only if it repeats."""
    try:
        problem = _retried(lambda: _problem(file, files, sums), patient)
    except FileNotFoundError:
        problem = "missing"
    except PermissionError:
        raise  # it may well be complete
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    return [f"{file.name}: {problem}"] if problem else []


def _problem(file: Path, files: Json, sums: bool) -> str | None:
    """Return a problem of a file, which is read if `sums` is true; the index of tensors always is."""
    recorded, status = files[file.name], file.stat()
    if not stat.S_ISREG(status.st_mode):
        return "is not a regular file"
    if status.st_size != recorded["bytes"]:
        return f"{status.st_size} bytes instead of the written {recorded['bytes']}"
    if sums and file_sum(file) != recorded["xxh3_128"]:
        return "its checksum differs from the recorded one"
    return _index_problem(file, files) if file.name == metadata.FILE else None


def _retried(read: Callable[[], T], patient: bool = True) -> T:
    """Read, and retry after an error that a network disk may recover from."""
    for pause_s in RETRY_AFTER_S if patient else ():
        try:
            return read()
        except OSError as error:
            if error.errno not in _TRANSIENT_ERRORS:
                raise
        time.sleep(pause_s)
    return read()
