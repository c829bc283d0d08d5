"""The CPU cores of a rank: those near its GPU, if every rank still gets its share."""

from __future__ import annotations

import os
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
    neighbours = sum(gpus[rank] & allowed == near for rank in range(ranks))
    if not near or near == allowed or neighbours * (len(allowed) // ranks) > len(near):
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
