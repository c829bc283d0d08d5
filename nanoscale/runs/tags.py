"""The tags of a run: the key run.tags of its configuration, until tags.json replaces them."""

from __future__ import annotations

from collections.abc import Sequence

from nanoscale.common.errors import UserError
from nanoscale.config.composing.frozen import read_values
from nanoscale.runs.directory import RunDirectory, write_json
from nanoscale.runs.documents import damaged, read_document

KEY = "run.tags"


def read(run: RunDirectory) -> list[str]:
    """Return the tags of a run. Raises UserError if one of its files is damaged."""
    return changed(run, read_values(run.config, (KEY,))[KEY])


def changed(run: RunDirectory, configured: Sequence[str]) -> list[str]:
    """Return the same, with the value of the key."""
    try:
        tags = read_document(run.tags).get("tags")
    except FileNotFoundError:
        return list(configured)
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        raise damaged(run.tags, "holds no list of tags")
    return tags


def write(run: RunDirectory, tags: Sequence[str]) -> None:
    """Replace the tags of a run. Raises UserError if its folder cannot be written to."""
    try:
        write_json(run.tags, {"tags": list(tags)})
    except OSError as error:
        raise UserError("run", f"{run.tags}: {error.strerror}") from error
