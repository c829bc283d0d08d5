"""A copy of a training state in host memory, so that the training can go on while it is written.

Weights and moments change at the end of a step only, in the optimizer. Those in host memory are copied by the
thread that writes, beside the forward and backward passes of the next step: see `hold`. Those of a GPU are
copied on a stream of their own, for which only the next update waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate

import torch
from torch import Tensor
from torch.cuda._pin_memory_utils import pin_memory, unpin_memory
from torch.distributed.tensor import DTensor

from nanoscale.checkpoint.flat import Box, FlatShard
from nanoscale.models.initialization import own_box

State = dict[str, Tensor]
CHANGED_BY_OPTIMIZER = ("model.", "optimizer.")
"""how the names of these tensors begin; see `Engine.state`"""
_ALIGNMENT = 64
"""bytes, of every copy in the buffer"""


class Staging:
    """A buffer for one copy, kept for the next one: making it takes longer than filling it."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None
        self._pending: list[tuple[Tensor, Tensor]] = []
        """copies, and what is still to be copied into them"""
        self._filled = threading.Event()
        self._filled.set()

    def take(self, state: State) -> State:
        """Return the state as it is now; it is complete once `fill` has returned."""
        parts = {name: _parts(value) for name, value in state.items()}
        on_gpu = any(part.is_cuda for several in parts.values() for part in several)
        copies = self._cut([part for several in parts.values() for part in several], pin=on_gpu)
        staged = {}
        with self._beside(on_gpu):
            for name, value in state.items():
                held = tuple(self._copy(name, part, next(copies)) for part in parts[name])
                staged[name] = _staged(value, held)
        if self._pending:
            self._filled.clear()
        return staged

    def fill(self) -> None:
        """Copy what is left to copy, and return when all copies are there; not for the thread that trains."""
        try:
            for copy, part in self._pending:
                copy.copy_(part)
        finally:
            self._pending.clear()
            self._filled.set()
        if self._copied is not None:
            torch.cuda.set_device(self._copied.device)  # a new thread begins on the first
            self._copied.synchronize()

    def hold(self) -> float:
        """Return when weights and moments may change; how long that took, seconds."""
        began = time.perf_counter()
        self._filled.wait()
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(
                self._copied
            )  # the device waits, the host does not
        return time.perf_counter() - began

    @contextmanager
    def _beside(self, on_gpu: bool) -> Iterator[None]:
        """Queue copies from a GPU on a stream of their own, so that what comes next is computed meanwhile."""
        if not on_gpu:
            yield
            return
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield
        self._copied = self._stream.record_event()

    def _cut(self, parts: list[Tensor], *, pin: bool) -> Iterator[Tensor]:
        """Return room for a copy of each part.

        One buffer for all of them: PyTorch's own pinned memory would take the next power of two of each.
        """
        sizes = [-(-part.nbytes // _ALIGNMENT) * _ALIGNMENT for part in parts]
        if self._buffer.nbytes != sum(sizes):
            if self._copied is not None:
                unpin_memory(self._buffer.data_ptr())
            self._buffer = torch.empty(sum(sizes), dtype=torch.uint8)
            if pin:
                pin_memory(self._buffer.data_ptr(), self._buffer.nbytes)
        starts = accumulate(sizes, initial=0)
        for part, start in zip(parts, starts, strict=False):
            yield self._buffer[start : start + part.nbytes].view(part.dtype).view(part.shape)

    def _copy(self, name: str, part: Tensor, copy: Tensor) -> Tensor:
        if name.startswith(CHANGED_BY_OPTIMIZER) and not part.is_cuda:
            self._pending.append((copy, part))
            return copy
        return copy.copy_(part, non_blocking=True)


def _parts(value: Tensor) -> tuple[Tensor, ...]:
    """What this rank has in memory of a tensor."""
    if isinstance(value, FlatShard):
        return value.parts
    local = value.to_local() if isinstance(value, DTensor) else value
    return (local.detach(),)


def _staged(value: Tensor, parts: tuple[Tensor, ...]) -> Tensor:
    """The same tensor, of copies of its parts."""
    if isinstance(value, FlatShard):
        return value.with_parts(parts)
    if isinstance(value, DTensor):
        return FlatShard(parts[0].view(-1), tuple(value.shape), 0, Box(*own_box(value)))
    return parts[0]
