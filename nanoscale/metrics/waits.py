"""The time for which this rank waits for others, or for a core, within its steps, on a CPU."""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

_waited = {"seconds": 0.0}
_main = threading.main_thread()
_statistics: list[int] = []
"""The open file of the main thread's statistics of scheduling, if the kernel has one (schedstat)."""


def seconds() -> float:
    """Return the seconds so far for which the main thread waited for others or, ready to run, for a core; 0
    unless `measure` was called."""
    return _waited["seconds"] + _delay()


def measure() -> None:
    """Measure every wait for the work of a collective, of a send and of a receive from now on.

    On GPUs the host does not wait for them.
    """
    dist.Work.wait = _timed(dist.Work.wait)  # type: ignore[method-assign]
    functional.wait_tensor = _timed(functional.wait_tensor)
    with suppress(OSError):
        _statistics[:] = [os.open(f"/proc/self/task/{_main.native_id}/schedstat", os.O_RDONLY)]


def _delay() -> float:
    """Return the seconds so far for which the main thread was ready to run and had no core."""
    if not _statistics:
        return 0.0
    return int(os.pread(_statistics[0], 100, 0).split()[1]) / 1e9


def _timed(wait: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(wait)
    def timed(*args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling() or threading.current_thread() is not _main:
            return wait(*args, **options)
        start = time.perf_counter() - _delay()
        try:
            return wait(*args, **options)
        finally:
            # without the delay within the wait, which `seconds` adds
            _waited["seconds"] += time.perf_counter() - _delay() - start

    return timed
