"""Settings of the processes of a job: CPU cores, how the C library returns memory, and open files."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Iterable, Sequence, Set

from nanoscale.common.devices import gpu_cores


def bind_to_gpu(local_rank: int, ranks: int) -> None:
    """Bind this process, and the threads and processes that it starts, to the cores near its GPU.

    Memory that it pins is then on the GPU's side too. A binding by SLURM, a cpuset or taskset is only
    narrowed.
    """
    allowed = os.sched_getaffinity(0)
    cores = near_cores(local_rank, ranks, gpu_cores(max(allowed)), allowed)
    if cores is not None:
        os.sched_setaffinity(0, cores)


def near_cores(
    local_rank: int, ranks: int, gpus: Sequence[Set[int]], allowed: Set[int]
) -> Set[int] | None:
    """Return the cores to bind a rank to; None if it stays unbound.

    It stays unbound if its GPU's cores are unknown, if none of them or only they are allowed, or if the ranks
    near them would have fewer cores than an even share of all.

    Args:
        ranks: ranks on this host.
        gpus: the cores near each GPU.
        allowed: cores that this process may run on.
    """
    if ranks > len(gpus):
        return None
    near = gpus[local_rank] & allowed
    neighbors = sum(gpus[rank] & allowed == near for rank in range(ranks))
    if not near or near == allowed or neighbors * (len(allowed) // ranks) > len(near):
        return None
    return near


def ranges(numbers: Iterable[int]) -> str:
    """Return `0-3,8` for 0, 1, 2, 3 and 8."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(f"{first}-{last}" if first != last else str(first) for first, last in spans)


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


MANY_FILES = 1 << 16
"""More than a rank of 10,000 opens: a connection to every other rank in several groups."""


def allow_open_files(count: int = MANY_FILES) -> None:
    """Raise this process's limit of open files to `count`, or to the hard limit; children inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
