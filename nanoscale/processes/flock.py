"""Locks of files between processes, on file systems that have them: some shared ones have none."""

from __future__ import annotations

import errno
import fcntl

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
