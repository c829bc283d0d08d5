"""The time for which this rank waits for others within its steps, on a CPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

_total = {"seconds": 0.0}
_main = threading.main_thread()


def seconds() -> float:
    """Return the seconds for which the main thread has waited so far; 0 unless `measure` was called."""
    return _total["seconds"]


def measure() -> None:
    """Measure every wait for the work of a collective, of a send and of a receive from now on.

    On GPUs the host does not wait for them.
    """
    dist.Work.wait = _timed(dist.Work.wait)  # type: ignore[method-assign]
    functional.wait_tensor = _timed(functional.wait_tensor)


def _timed(wait: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(wait)
    def timed(*args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling() or threading.current_thread() is not _main:
            return wait(*args, **options)
        start = time.perf_counter()
        try:
            return wait(*args, **options)
        finally:
            _total["seconds"] += time.perf_counter() - start

    return timed
