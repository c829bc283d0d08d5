"""PyTorch's memory on a CPU as its profiler records it."""

from __future__ import annotations

import numpy as np
from torch.profiler import profile


def peak_bytes(recorded: profile) -> int:
    """Return the most bytes that were allocated at once."""
    return int(np.cumsum([size for _, size in memory_changes(recorded)]).max())


def memory_changes(recorded: profile) -> list[tuple[int, int]]:
    """When how many bytes were taken, or given back."""
    assert recorded.profiler is not None
    return sorted(
        (event.start_ns(), event.nbytes())
        for event in recorded.profiler.kineto_results.events()
        if event.name() == "[memory]"
    )
