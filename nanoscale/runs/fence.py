"""The fence of a run: only the newest attempt can change its checkpoints.

Each attempt has a workspace, the folder `checkpoints/.attempt-<k>`, which its launcher creates and no rank
ever does. Every change of ranks in `checkpoints/` is one rename out of their workspace (a checkpoint that is
published, the link `latest`) or into it (a checkpoint that is deleted). Before another attempt begins, the
launcher removes the workspace: it renames it, then renames its content, one entry at a time, until it is empty
and can be removed. After that a rank's rename has no source or no destination, on any host and however late it
comes. Of two renames of one file the file system performs one, so there is no moment between a check and an
act, and no need for locks, which some shared file systems lack.
"""

import errno
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nanoscale.runs.directory import RunDirectory

MISSING_S = 30.0
"""Seconds for a folder that is out of sight to come back, as after a hiccup of a network file system."""
_MISSING = (errno.ENOENT, errno.ESTALE)
_PAUSE_S = 0.1


class FencedError(OSError):
    """The run has continued without this rank's attempt, which can no longer change anything."""


class MissingFolderError(FencedError):
    """The run's folder, or its checkpoints' folder, was deleted or renamed during the run."""


def begin(run: RunDirectory, attempt: int) -> None:
    """Let an attempt, and no other one, change the checkpoints. For launchers."""
    end(run)
    run.checkpoints.mkdir(exist_ok=True)  # who deleted all checkpoints may have deleted the folder
    run.workspace(attempt).mkdir()


def end(run: RunDirectory) -> None:
    """Let no attempt change the checkpoints any more, and remove unpublished files."""
    for workspace in run.checkpoints.glob(".attempt-*"):
        workspace.rename(workspace.with_name(f".ended-{uuid.uuid4().hex}"))
    for workspace in run.checkpoints.glob(".ended-*"):
        _remove_workspace(workspace)
    for leftover in run.checkpoints.glob(".deleting-*"):
        if leftover.is_symlink():
            leftover.unlink(missing_ok=True)
        else:  # if a rank still writes there, the next attempt removes the rest
            shutil.rmtree(leftover, ignore_errors=True)


def require(workspace: Path) -> None:
    """Raise a FencedError if the run has continued without the attempt that has this workspace.

    It is a MissingFolderError if the run was not taken over, but its folder was out of sight for MISSING_S.
    """
    deadline = time.monotonic() + MISSING_S
    while True:
        try:
            return _require(workspace)
        except MissingFolderError:
            if time.monotonic() > deadline:
                raise
        time.sleep(_PAUSE_S)


def _require(workspace: Path) -> None:
    """Raise the error of `require` at once.

    The folder is modified, not only read: a client of a network file system could answer from its cache.
    """
    try:
        os.utime(workspace)
    except OSError as error:
        if error.errno not in _MISSING:
            raise
        for folder in (workspace.parents[1], workspace.parent):
            if not folder.exists():
                raise MissingFolderError(
                    f"{folder} was deleted or renamed while the run was running, or its file system was out "
                    f"of sight for {MISSING_S:g} s"
                ) from None
        others = sorted(workspace.parent.glob(".attempt-*"))[:1]
        running = "".join(f" ({other.name[1:].replace('-', ' ')} is running)" for other in others)
        raise FencedError(f"the run has continued without this rank{running}") from None


@contextmanager
def explained(workspace: Path) -> Iterator[None]:
    """Turn errors that follow from the removed workspace into a FencedError."""
    try:
        yield
    except FencedError:
        raise
    except OSError as error:
        try:
            require(workspace)
        except FencedError as fenced:
            raise fenced from error
        raise


def _remove_workspace(workspace: Path) -> None:
    """Remove a workspace entry by entry: another host may hold its handle, and still rename in it."""
    while workspace.exists():  # a rank may still write into it
        for entry in list(workspace.iterdir()):
            with suppress(FileNotFoundError):  # it was published at the last moment
                entry.rename(workspace.with_name(f".deleting-{uuid.uuid4().hex}"))
        try:
            workspace.rmdir()
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, *_MISSING):
                raise
