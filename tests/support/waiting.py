"""Waiting for a condition, with a limit that only a fault reaches."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

LIMIT_S = 240


def wait_until(condition: Callable[[], Any], limit_s: float = LIMIT_S) -> None:
    """Return when the condition is true.

    Raises:
        TimeoutError: it is not after `limit_s` seconds.
    """
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"not after {limit_s} s")
        time.sleep(0.02)
