"""The system's limits of a process."""

from __future__ import annotations

import resource

MANY_FILES = 1 << 16
"""More than a rank of 10,000 opens: a connection to every other rank in several groups."""


def allow_open_files(count: int = MANY_FILES) -> None:
    """Raise this process's limit of open files to `count`, or to the hard limit; children inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
