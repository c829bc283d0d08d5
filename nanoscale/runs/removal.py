"""Removal of a run: one rename takes its name away, so that no half-deleted folder is mistaken for a run."""

from __future__ import annotations

import os
import shutil
import stat
import uuid
from contextlib import suppress
from pathlib import Path

from nanoscale.runs.directory import RunDirectory

_PREFIX = ".deleting-"


def size_of(folder: Path) -> int:
    """Return the bytes of all files in a folder; a file with several names counts once."""
    sizes: dict[tuple[int, int], int] = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # a log or a checkpoint that is replaced
                status = Path(parent, name).lstat()
                if stat.S_ISREG(status.st_mode):
                    sizes[status.st_dev, status.st_ino] = status.st_size
    return sum(sizes.values())


def remove(run: RunDirectory) -> None:
    """Delete a run that this process has locked, and what an interrupted removal left next to it.

    Raises:
        OSError: something cannot be deleted; the folder has lost its name, unless the rename failed.
    """
    folder = run.path.resolve()
    renamed = folder.with_name(f"{_PREFIX}{uuid.uuid4().hex}")
    folder.rename(renamed)
    if run.path.is_symlink():
        run.path.unlink()
    (renamed / run.config.name).unlink()  # from here on, no command opens it by its new name either
    for leftover in folder.parent.glob(f"{_PREFIX}*"):
        if not (leftover / run.config.name).exists():
            shutil.rmtree(leftover, ignore_errors=leftover != renamed)
