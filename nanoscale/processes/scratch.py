"""Locks of files between processes, and temporary folders. The next process removes a killed one's folders.

A process holds a flock on a file in its folder. The semaphores of multiprocessing carry the folder's name.
"""

import errno
import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_PREFIX = "nanoscale-"
_LOCK = "lock"
_REMOVED_SUFFIX = ".removed"
"""The suffix of the name of a folder that is being removed."""
_TRIES = 20
SHARED_MEMORY = Path("/dev/shm")

_own_folders: list[Path] = []


def make(parent: str | None = None) -> Path:
    """Return a new folder for temporary files of this process; remove the folders of ended processes."""
    remove_stale(parent)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    # Locked until this process ends, and renamed once it is locked: others consider an unlocked one stale.
    handle = os.open(folder / "lock.new", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_EX)
        (folder / "lock.new").rename(folder / _LOCK)
    _own_folders.append(folder)
    return folder


def remove_own() -> None:
    """Remove the folders that this process has made. Its resource tracker removes their semaphores."""
    for folder in _own_folders:
        remove(folder, semaphores=False)


def remove(folder: Path, *, semaphores: bool = True) -> None:
    """Remove a folder, and its semaphores unless another process does."""
    if semaphores:
        for semaphore in SHARED_MEMORY.glob(f"sem.{folder.name}-*"):
            semaphore.unlink(missing_ok=True)
    # Renamed first, so that a rank that is about to end adds no file to it.
    renamed = folder.with_name(folder.name.removesuffix(_REMOVED_SUFFIX) + _REMOVED_SUFFIX)
    with suppress(OSError):
        folder.rename(renamed)
    for _ in range(_TRIES):  # others may remove it too, and end this process once it is removed
        if not renamed.exists():
            break
        shutil.rmtree(renamed, ignore_errors=True)


def remove_stale(parent: str | None = None) -> None:
    """Remove this user's folders of ended processes; with `parent=None`, also those in shared memory."""
    parents = [Path(parent)] if parent else [Path(tempfile.gettempdir()), SHARED_MEMORY]
    for folder in (folder for place in parents for folder in place.glob(f"{_PREFIX}*")):
        with suppress(OSError):
            if folder.stat().st_uid == os.getuid() and is_stale(folder):
                remove(folder)


def is_stale(folder: Path) -> bool:
    """True if the process that made a folder has ended."""
    if folder.name.endswith(_REMOVED_SUFFIX):
        return True
    handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(handle)
    return True


_UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


def flock(handle: int, kind: int) -> bool:
    """Lock an open file; return False if another process holds a lock and `kind` contains LOCK_NB.

    Return True also on a file system without locks.
    """
    try:
        fcntl.flock(handle, kind)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    return True
