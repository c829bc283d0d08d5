"""Changes of a run that is not running: its tags and its removal.

The tags are the key run.tags of its configuration, until tags.json replaces them. A run is removed by one
rename that takes its name away, so that no half-deleted folder is mistaken for a run.
"""

import os
import shutil
import stat
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from nanoscale.common.errors import UserError
from nanoscale.config.composing.frozen import read_values
from nanoscale.runs.directory import RunDirectory, write_json
from nanoscale.runs.documents import damaged, read_document

TAGS_KEY = "run.tags"
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


def read_tags(run: RunDirectory) -> list[str]:
    """Return the tags of a run. Raises UserError if one of its files is damaged."""
    return current_tags(run, read_values(run.config, (TAGS_KEY,))[TAGS_KEY])


def current_tags(run: RunDirectory, configured: Sequence[str]) -> list[str]:
    """Return the same, with the value of the key."""
    try:
        tags = read_document(run.tags).get("tags")
    except FileNotFoundError:
        return list(configured)
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        raise damaged(run.tags, "holds no list of tags")
    return tags


def write_tags(run: RunDirectory, tags: Sequence[str]) -> None:
    """Replace the tags of a run. Raises UserError if its folder cannot be written to."""
    try:
        write_json(run.tags, {"tags": list(tags)})
    except OSError as error:
        raise UserError("run", f"{run.tags}: {error.strerror}") from error
