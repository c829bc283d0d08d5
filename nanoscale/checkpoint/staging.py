"""A copy of a training state in host memory, so that the training can go on while it is written."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from nanoscale.checkpoint.flat import Box, FlatShard
from nanoscale.models.initialization import own_box

State = dict[str, Tensor]


class Staging:
    """Buffers for one copy, kept for the next one: making them takes longer than filling them."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._copied: torch.cuda.Event | None = None

    def take(self, state: State) -> State:
        """The state as it is now. From a GPU the copies are only queued: see `wait`."""
        staged = {name: self._stage(name, value) for name, value in state.items()}
        if any(_memory_of(value).is_cuda for value in state.values()):
            # Whatever changes the state is queued behind the copies, on the same stream.
            self._copied = torch.cuda.Event()
            self._copied.record()
        return staged

    def wait(self) -> None:
        """Return when the copies are there; not for the thread that trains."""
        if self._copied is not None:
            self._copied.synchronize()

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
        return kept.copy_(memory, non_blocking=True)


def _memory_of(value: Tensor) -> Tensor:
    """What this rank has of a tensor."""
    if isinstance(value, FlatShard):
        return value.local
    local = value.to_local() if isinstance(value, DTensor) else value
    return local.detach()
