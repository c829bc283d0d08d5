"""A copy of a training state in host memory, so that the training can continue while it is written.

Weights and moments change only at the end of a step, in the optimizer. The writing thread copies tensors in
host memory, in parallel with the forward and backward passes of the next step: see `hold`. Tensors of a GPU are
copied on a stream of their own, for which only the next update waits.
"""

import _thread
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, chain
from typing import TypeVar

import torch
from torch import Tensor
from torch.cuda._pin_memory_utils import pin_memory, unpin_memory
from torch.distributed.tensor import DTensor

from nanoscale.checkpoint.flat import Box, FlatShard
from nanoscale.models.initialization import local_region

T = TypeVar("T")
State = dict[str, Tensor]
Layout = list[tuple[torch.dtype, torch.Size]]
"""The types and shapes of the tensors of a copy."""
CHANGED_BY_OPTIMIZER = ("model.", "optimizer.")
"""Prefixes of the names of these tensors; see `Engine.state`."""


class Staging:
    """A buffer for one copy, kept for the next one: allocating it takes longer than filling it.

    Args:
        buffer: memory for exactly this copy, if it shall be in a certain place.
    """

    def __init__(self, buffer: Tensor | None = None) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8) if buffer is None else buffer
        self._is_given = buffer is not None
        self._is_pinned = False
        self._layout: Layout = []
        self._copies: Future[list[Tensor]] = Future()
        """The buffer's memory for tensors of this layout."""
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None
        self._pending: list[tuple[Tensor, Tensor]] = []
        """Copies, and the tensors still to be copied into them."""
        self._sources: list[Tensor] = []
        """The tensors of a copy in progress, some of which were computed for it and have no other owner."""
        self._filled = threading.Event()
        self._filled.set()

    def prepare(self, state: Callable[[], State]) -> None:
        """Begin to allocate the buffer for such states in another thread, unless it has been."""
        if not self._layout:
            self._lay_out([*chain.from_iterable(map(_local_tensors, state().values()))])

    def copy(self, state: State) -> State:
        """Return a copy of the present state; it is complete once `fill` has returned."""
        tensors_of = {name: _local_tensors(value) for name, value in state.items()}
        self._sources = all_tensors = list(chain.from_iterable(tensors_of.values()))
        on_gpu = any(tensor.is_cuda for tensor in all_tensors)
        self._lay_out(all_tensors)
        copies = iter(self._copies.result())
        staged = {}
        with self._on_copy_stream(on_gpu):
            for name, tensors in tensors_of.items():
                copied = tuple(self._copy(name, tensor, next(copies)) for tensor in tensors)
                staged[name] = _staged(state[name], copied)
        if self._pending:
            self._filled.clear()
        return staged

    def fill(self) -> None:
        """Make the remaining copies, and return when all are complete; not for the thread that trains."""
        try:
            if self._pending:
                copies, sources = zip(*self._pending, strict=True)
                torch._foreach_copy_(copies, sources)
        finally:
            self._pending.clear()
            self._filled.set()
        if self._copied is not None:
            self._copied.synchronize()
        self._sources = []

    def hold(self) -> float:
        """Wait until weights and moments may change; return the seconds that this took."""
        start = time.perf_counter()
        self._filled.wait()
        if self._copied is not None:
            # the device waits, the host does not
            torch.cuda.current_stream().wait_event(self._copied)
        return time.perf_counter() - start

    @contextmanager
    def _on_copy_stream(self, on_gpu: bool) -> Iterator[None]:
        """Queue copies from a GPU on a stream of their own, so that later work is computed meanwhile."""
        if not on_gpu:
            yield
            return
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield
        self._copied = self._stream.record_event()

    def _lay_out(self, tensors: list[Tensor]) -> None:
        """Begin to give each tensor its copy, unless the copies before had the same layout."""
        layout = [(tensor.dtype, tensor.shape) for tensor in tensors]
        if layout != self._layout:
            pin = any(tensor.is_cuda for tensor in tensors)
            if self._layout:
                self._copies.result()
            self._layout, self._copies = layout, in_thread(partial(self._allocate, layout, pin))

    def _allocate(self, layout: Layout, pin: bool) -> list[Tensor]:
        """Return the copies in the buffer, a new one if the size has changed.

        One buffer holds all of them: PyTorch's own pinned memory would round each up to a power of two.
        """
        sizes = [dtype.itemsize * shape.numel() for dtype, shape in layout]
        starts = [*accumulate(map(aligned, sizes), initial=0)]
        if self._buffer.nbytes != starts[-1]:
            assert not self._is_given, "the state has other sizes than its file"
            if self._is_pinned:
                unpin_memory(self._buffer.data_ptr())
            self._buffer = torch.empty(starts[-1], dtype=torch.uint8)
            if pin:
                pin_memory(self._buffer.data_ptr(), self._buffer.nbytes)
            self._is_pinned = pin
        return [
            self._buffer[start : start + size].view(dtype).view(shape)
            for (dtype, shape), size, start in zip(layout, sizes, starts, strict=False)
        ]

    def _copy(self, name: str, source: Tensor, copy: Tensor) -> Tensor:
        if name.startswith(CHANGED_BY_OPTIMIZER) and not source.is_cuda:
            self._pending.append((copy, source))
            return copy
        return copy.copy_(source, non_blocking=True)


def in_thread(action: Callable[[], T]) -> Future[T]:
    """Run `action` in a daemon thread, which does not keep a failing process alive, on the present device."""
    outcome: Future[T] = Future()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)  # a new thread starts on the first device
            outcome.set_result(action())
        except BaseException as error:
            outcome.set_exception(error)

    _thread.start_new_thread(run, ())  # unlike `Thread.start`, it does not wait for the thread
    return outcome


def aligned(size: int) -> int:
    """Return the bytes of a copy in the buffer, which ends at a multiple of 64."""
    return -(-size // 64) * 64


def _local_tensors(value: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors of this rank's memory that make up a value."""
    if isinstance(value, FlatShard):
        return value.parts
    local = value.to_local() if isinstance(value, DTensor) else value
    return (local.detach(),)


def _staged(value: Tensor, copies: tuple[Tensor, ...]) -> Tensor:
    """Return the same tensor, made of copies of its parts."""
    if isinstance(value, FlatShard):
        return value.with_parts(copies)
    if isinstance(value, DTensor):
        return FlatShard(copies[0].view(-1), tuple(value.shape), 0, Box(*local_region(value)))
    return copies[0]
