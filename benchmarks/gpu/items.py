"""Many small measurements in one process, which prints a JSON line before and after each."""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

BROKEN = 3
"""The exit code after an error that leaves the GPU unusable for this process."""


def run_items(
    items: Mapping[str, Callable[[], dict[str, Any]]],
    skipped: Collection[str],
    failed: str = "WRONG",
) -> None:
    """Run measurements, which return figures with a `verdict`; a failed one does not stop the others."""
    for name, act in items.items():
        if name in skipped:
            continue
        print(json.dumps({"item": name}), flush=True)
        gc.collect()  # memory of the one before
        began = time.monotonic()
        try:
            row = act()
        except Exception as error:
            word = "does not fit" if "OutOfMemory" in type(error).__name__ else failed
            row = {"verdict": f"{word}: {type(error).__name__}: {str(error)[:300]}"}
        row = {"item": name, **row, "seconds": round(time.monotonic() - began, 1)}
        print(json.dumps(row), flush=True)
        if "CUDA error" in row["verdict"] or "AcceleratorError" in row["verdict"]:
            os._exit(BROKEN)


def read_items(output: str) -> dict[str, dict[str, Any]]:
    """Return the rows of a process's output by name; one that it began and did not end has no verdict."""
    lines = [line for line in output.splitlines() if line.startswith('{"item": ')]
    return {row["item"]: row for row in map(json.loads, lines)}
