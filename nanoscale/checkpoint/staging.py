"""A copy of a training state in host memory, so that the training can go on while it is written.

Weights and moments change at the end of a step only, in the optimizer. Those in host memory are copied by the
thread that writes, beside the forward and backward passes of the next step: see `hold`. From a GPU the copies
are queued before whatever comes next, and nobody waits for them.
"""

from __future__ import annotations

import threading
import time

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from nanoscale.checkpoint.flat import Box, FlatShard
from nanoscale.models.initialization import own_box

State = dict[str, Tensor]
CHANGED_BY_OPTIMIZER = ("model.", "optimizer.")
"""how the names of these tensors begin; see `Engine.state`"""


class Staging:
    """Buffers for one copy, kept for the next one: making them takes longer than filling them."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._copied: torch.cuda.Event | None = None
        self._pending: list[tuple[Tensor, Tensor]] = []
        """buffers, and what is still to be copied into them"""
        self._filled = threading.Event()
        self._filled.set()

    def take(self, state: State) -> State:
        """The state as it is now, once `fill` has returned."""
        staged = {name: self._stage(name, value) for name, value in state.items()}
        if any(_memory_of(value).is_cuda for value in state.values()):
            # Whatever changes the state is queued behind the copies, on the same stream.
            self._copied = torch.cuda.Event()
            self._copied.record()
        if self._pending:
            self._filled.clear()
        return staged

    def fill(self) -> None:
        """Copy what is left to copy, and return when all copies are there; not for the thread that trains."""
        try:
            for buffer, memory in self._pending:
                buffer.copy_(memory)
        finally:
            self._pending.clear()
            self._filled.set()
        if self._copied is not None:
            self._copied.synchronize()

    def hold(self) -> float:
        """Return when weights and moments may change; how long that took, seconds."""
        began = time.perf_counter()
        self._filled.wait()
        return time.perf_counter() - began

    def _stage(self, name: str, value: Tensor) -> Tensor:
        here = self._copy(name, _memory_of(value))
        if isinstance(value, FlatShard):
            return FlatShard(here, tuple(value.shape), value.start, value.window)
        if isinstance(value, DTensor):
            return FlatShard(here.view(-1), tuple(value.shape), 0, Box(*own_box(value)))
        return here

    def _copy(self, name: str, memory: Tensor) -> Tensor:
        kept = self._buffers.get(name)
        if kept is None or kept.shape != memory.shape or kept.dtype != memory.dtype:
            kept = torch.empty(memory.shape, dtype=memory.dtype, pin_memory=memory.is_cuda)
            self._buffers[name] = kept
        if name.startswith(CHANGED_BY_OPTIMIZER) and not memory.is_cuda:
            self._pending.append((kept, memory))
            return kept
        return kept.copy_(memory, non_blocking=True)


def _memory_of(value: Tensor) -> Tensor:
    """What this rank has of a tensor."""
    if isinstance(value, FlatShard):
        return value.local
    local = value.to_local() if isinstance(value, DTensor) else value
    return local.detach()
