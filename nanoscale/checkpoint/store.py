"""Checkpoints on disk: whole or absent, and every byte accounted for. Imports no torch.

A checkpoint is a folder `step-<8 digits>` with a `manifest.json` that records the size and the XXH3-128 sum
of every other file in it, and a sum of itself. It is written in the workspace of the run's attempt and
becomes visible by one rename. Whatever else is changed here is also a rename out of this workspace or into
it, which fails once the run has gone on without the attempt; nanoscale/runs/fence.py tells why that is
enough.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoscale.checkpoint import metadata
from nanoscale.checkpoint.metadata import MetadataError
from nanoscale.errors import UserError, Violation
from nanoscale.runs import fence
from nanoscale.units import byte_size

MANIFEST = "manifest.json"
FORMAT = 1
BY_TIME = "by_time"
"""key of a manifest; true in a checkpoint that was saved because of checkpoint.every_minutes alone"""
_NAME = re.compile(r"step-(\d{8,})")
_READ_BYTES = 1 << 20


class DamagedCheckpointError(Exception):
    """A checkpoint's manifest cannot be trusted; the text names the file."""


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint that has been published; whether it is still whole, `find_damage` tells."""

    path: Path
    step: int

    @property
    def manifest(self) -> dict[str, Any]:
        return read_manifest(self.path)


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def staging_path(workspace: Path, step: int) -> Path:
    """Where the ranks write a checkpoint before it is published."""
    return workspace / f"writing-step-{step:08d}"


def list_checkpoints(folder: Path) -> list[StoredCheckpoint]:
    """What has been published in a run's `checkpoints/`, by step."""
    if not folder.is_dir():
        return []
    matches = ((path, _NAME.fullmatch(path.name)) for path in folder.iterdir() if path.is_dir())
    return sorted(
        (StoredCheckpoint(path, int(match[1])) for path, match in matches if match),
        key=lambda stored: stored.step,
    )


def find_checkpoint(folder: Path, step: int | None) -> StoredCheckpoint:
    """The checkpoint of a step, or the newest.

    Raises:
        UserError: there is none.
    """
    stored = list_checkpoints(folder)
    if step is None and stored:
        return stored[-1]
    for candidate in stored:
        if candidate.step == step:
            return candidate
    message = "there is no checkpoint" + ("" if step is None else f" of step {step}")
    steps = tuple(f"--step {candidate.step}" for candidate in stored)
    violation = Violation(str(folder), step, "command line", message, steps)
    raise UserError("checkpoint", f"{message} in {folder}", [violation])


def require_space(folder: Path, size: int) -> None:
    """Raise an OSError before anything is written where `size` bytes would not fit."""
    free = shutil.disk_usage(folder).free
    if free < size:
        raise OSError(
            28,
            f"no space left for a checkpoint of {byte_size(size)}: "
            f"{byte_size(free)} are free in {folder}; nothing was written",
        )


def publish(staging: Path, manifest: dict[str, Any], sums: dict[str, dict[str, Any]]) -> Path:
    """Make a checkpoint visible, and `latest` point to it, after every file in it is on disk.

    `sums` is what `sum_files` gave for all files in `staging`.

    Raises:
        FencedError: the run has gone on without this attempt.
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
    """Let the link `latest` name a checkpoint, or nothing."""
    link, aside = workspace.parent / "latest", workspace / "latest"
    aside.unlink(missing_ok=True)
    if target is not None:
        aside.symlink_to(target.name)
        aside.rename(link)
        sync_folder(link.parent)
    elif link.is_symlink():
        link.rename(aside)


@dataclass(frozen=True)
class Pruned:
    """The old checkpoints of a run, by step."""

    deleted: list[int]
    failed: dict[int, str]
    """those that could not be deleted, with the reason"""


def prune(workspace: Path, keep_last: int | None, keep_every: int | None) -> Pruned:
    """Delete what is neither among the newest `keep_last` nor a multiple of `keep_every`.

    `keep_last=None` keeps all but a checkpoint that was saved by time, once there is a newer one.

    Raises:
        FencedError: the run has gone on without this attempt.
    """
    stored = list_checkpoints(workspace.parent)
    if keep_last is None:  # every save has looked at the one before it: one is enough to look at
        old = [c for c in stored[-2:-1] if _saved_by_time(c)]
    else:
        old = stored[:-keep_last]
    pruned = Pruned([], {})
    for checkpoint in old:
        if keep_every and checkpoint.step % keep_every == 0:
            continue
        try:
            with fence.explained(workspace):
                # Renamed first, so that a half-deleted one is never taken for a checkpoint.
                doomed = workspace / f"deleting-{checkpoint.path.name}"
                checkpoint.path.rename(doomed)
                shutil.rmtree(doomed)
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
        return False  # kept, for somebody to look at


def set_aside(workspace: Path, checkpoint: StoredCheckpoint) -> Path:
    """Rename a damaged checkpoint, so that it is in nobody's way and still there to look at.

    Raises:
        FencedError: the run has gone on without this attempt.
    """
    folder = checkpoint.path.parent
    aside = folder / f"damaged-{checkpoint.path.name}"
    number = 2
    while aside.exists():
        aside = folder / f"damaged-{checkpoint.path.name}-{number}"
        number += 1
    with fence.explained(workspace):
        checkpoint.path.rename(workspace / aside.name)
        (workspace / aside.name).rename(aside)
        left = list_checkpoints(folder)
        point_latest(workspace, left[-1].path if left else None)
    return aside


def find_damage(path: Path, share: int = 0, shares: int = 1, *, sums: bool = True) -> list[str]:
    """What is wrong with a checkpoint, one sentence a file; empty: it is whole.

    Several processes can divide the reading: each names its share of the files. Without `sums` files are not
    read, and a flipped bit is not found.
    """
    try:
        manifest = read_manifest(path)
    except DamagedCheckpointError as error:
        return [str(error)]
    files = manifest["files"]
    damage = []
    if share == 0:
        present = {file.name for file in path.iterdir()} - {MANIFEST}
        damage += [f"{name}: not in the manifest" for name in sorted(present - set(files))]
        if checkpoint_path(path.parent, manifest["step"]).name != path.name:
            damage.append(f"{MANIFEST}: belongs to step {manifest['step']}")
    for name in sorted(files)[share::shares]:
        found = _file_damage(path / name, files[name], sums)
        if name == metadata.FILE and not found:
            found = _index_damage(path, files)
        damage += found
    return damage


def sum_files(paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Size in bytes and XXH3-128 sum of each file, by name."""
    return {path.name: {"bytes": path.stat().st_size, "xxh3_128": file_sum(path)} for path in paths}


def file_sum(path: Path) -> str:
    import xxhash

    state = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            state.update(chunk)
    return state.hexdigest()


def render_manifest(manifest: dict[str, Any]) -> str:
    """A manifest as text, with the sum of its own content."""
    import xxhash

    content = json.dumps(manifest, indent=1)
    return (
        json.dumps(manifest | {"sum": xxhash.xxh3_128_hexdigest(content.encode())}, indent=1) + "\n"
    )


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint folder.

    Raises:
        DamagedCheckpointError: it is missing, or differs by so much as a byte from what was written.
    """
    file = path / MANIFEST
    try:
        text = file.read_text(encoding="utf-8")
        manifest = json.loads(text)
        manifest.pop("sum")
        whole = render_manifest(manifest) == text
    except FileNotFoundError:
        raise DamagedCheckpointError(f"{MANIFEST}: missing") from None
    except PermissionError:
        raise  # it may well be whole
    except OSError as error:
        raise DamagedCheckpointError(f"{MANIFEST}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, AttributeError, TypeError):
        whole = False
    if not whole:
        raise DamagedCheckpointError(f"{MANIFEST}: its sum differs from its content")
    if manifest["format"] != FORMAT:
        raise DamagedCheckpointError(f"{MANIFEST}: format {manifest['format']} is not {FORMAT}")
    return dict(manifest)


def _index_damage(path: Path, files: dict[str, Any]) -> list[str]:
    """What is wrong with the index of tensors, whose bytes are those that were recorded."""
    try:
        shards = [
            it for tensor in metadata.read(path / metadata.FILE).values() for it in tensor.shards
        ]
    except MetadataError as error:
        return [f"{metadata.FILE}: {error}"]
    outside = {
        shard.file
        for shard in shards
        if shard.start + shard.length > files.get(shard.file, {"bytes": -1})["bytes"]
    }
    return [
        f"{metadata.FILE}: names bytes of {name!r} that are not there" for name in sorted(outside)
    ]


def sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _file_damage(file: Path, recorded: dict[str, Any], sums: bool) -> list[str]:
    try:
        size = file.stat().st_size
        if size != recorded["bytes"]:
            return [f"{file.name}: {size} bytes, written were {recorded['bytes']}"]
        if sums and file_sum(file) != recorded["xxh3_128"]:
            return [f"{file.name}: its sum differs from the one recorded when it was written"]
    except FileNotFoundError:
        return [f"{file.name}: missing"]
    except PermissionError:
        raise  # it may well be whole
    except OSError as error:
        return [f"{file.name}: cannot be read: {error.strerror}"]
    return []
