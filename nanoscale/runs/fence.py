"""The fence of a run: only the attempt that was begun last can change its checkpoints.

Each attempt has a workspace, the folder `checkpoints/.attempt-<k>`, which its launcher makes and no rank ever
does. Whatever ranks change in `checkpoints/` is one rename out of their workspace (a checkpoint that is
published, the link `latest`) or into it (a checkpoint that is deleted). Before a further attempt begins, the
launcher takes the workspace away: it renames it, then renames what is in there, piece by piece, until it is
empty and can be removed. After that a rank's rename finds nothing to take or nowhere to put it, on whatever
host it is and however late it comes. Of two renames of one thing the file system lets one happen, so there is
no moment between a check and an act, and no need for locks, which not every shared file system has.
"""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nanoscale.runs.directory import RunDirectory

_GONE = (errno.ENOENT, errno.ESTALE)


class FencedError(OSError):
    """The run has gone on without this rank's attempt, which can change nothing there any more."""


class MissingFolderError(FencedError):
    """The run's folder, or that of its checkpoints, was deleted or renamed while the run was going on."""


def begin(run: RunDirectory, attempt: int) -> None:
    """Let an attempt change the checkpoints, and no other one any more. For launchers."""
    end(run)
    run.workspace(attempt).mkdir()


def end(run: RunDirectory) -> None:
    """Let no attempt change the checkpoints any more, and remove what was not published."""
    for workspace in run.checkpoints.glob(".attempt-*"):
        workspace.rename(workspace.with_name(f".ended-{uuid.uuid4().hex}"))
    for workspace in run.checkpoints.glob(".ended-*"):
        _take_away(workspace)
    for remains in run.checkpoints.glob(".deleting-*"):
        if remains.is_symlink():
            remains.unlink(missing_ok=True)
        else:  # where a rank still writes there, the last of it goes with the next attempt
            shutil.rmtree(remains, ignore_errors=True)


def require(workspace: Path) -> None:
    """Raise a FencedError where the run has gone on without the attempt that has this workspace.

    That is a MissingFolderError where nobody has taken the run, and its folder is not there any more.

    The folder is touched, not looked at: a client of a network file system would answer a look from memory.
    """
    try:
        os.utime(workspace)
    except OSError as error:
        if error.errno not in _GONE:
            raise
        for folder in (workspace.parents[1], workspace.parent):
            if not folder.exists():
                raise MissingFolderError(
                    f"{folder} was deleted or renamed while the run was going on"
                ) from None
        raise FencedError(_explain(workspace)) from None


@contextmanager
def explained(workspace: Path) -> Iterator[None]:
    """Turn what fails because the workspace was taken away into the FencedError that it is."""
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


def _take_away(workspace: Path) -> None:
    """Piece by piece: another host may still know the folder by its handle, and rename into it or out of it."""
    while workspace.exists():  # a rank may still be filling it
        for thing in list(workspace.iterdir()):
            with suppress(FileNotFoundError):  # it was published at the last moment
                thing.rename(workspace.with_name(f".deleting-{uuid.uuid4().hex}"))
        try:
            workspace.rmdir()
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, *_GONE):
                raise


def _explain(workspace: Path) -> str:
    others = sorted(workspace.parent.glob(".attempt-*"))
    running = "".join(f" ({other.name[1:].replace('-', ' ')} is running)" for other in others[:1])
    return f"the run has gone on without this rank{running}"
