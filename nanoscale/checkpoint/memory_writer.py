"""Checkpoints in the shared memory of hosts, which outlives the ranks: `checkpoint.memory_every`.

Each host keeps the state of its ranks in files of its agent's folder, two of each rank, so that one is complete
while the other is written. A tensor that several ranks of a host hold is written by one of them. Each rank then
sends its file to the agent of another host, unless another host holds the same tensors in any case.

A file is filled while the next step is computed, and it is complete before the ranks compute the norm of that
step. So no rank can begin to overwrite a state before all ranks have completed the next one.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import torch
import xxhash
from torch import Tensor
from torch.cuda._pin_memory_utils import pin_memory, unpin_memory
from torch.distributed.tensor import DTensor

from nanoscale.checkpoint.flat import Box, FlatShard
from nanoscale.checkpoint.staging import ALIGNMENT, Staging, State
from nanoscale.common.units import byte_size
from nanoscale.models.initialization import local_region
from nanoscale.parallel import process_group
from nanoscale.processes.peer_files import PeerFiles, write_committed
from nanoscale.runs.memory_order import MemoryOrder, file_name

T = TypeVar("T")
Boxes = tuple[Box, ...]


@dataclass(frozen=True)
class Shares:
    """The tensors that each rank of this host writes, and the hosts that hold the same tensors."""

    local: tuple[str, ...]
    """The names of the tensors that this rank writes."""
    covers: tuple[int, ...]
    """The numbers of the hosts whose tensors this host holds too, itself included."""
    is_covered: bool
    """True if another host holds all tensors of this host."""


class SharedMemoryError(OSError):
    """The shared memory of this host is too small for the checkpoints in it."""


@dataclass
class _Slot:
    """A file of this rank's tensors, mapped into memory."""

    path: Path
    size: int
    buffer: Tensor = field(init=False)
    staging: Staging = field(init=False)

    def __post_init__(self) -> None:
        with self.path.open("wb") as file:
            try:
                # A write into the mapped file without enough shared memory would end the process.
                os.posix_fallocate(file.fileno(), 0, max(1, self.size))
            except OSError as error:
                free = byte_size(shutil.disk_usage(self.path.parent).free)
                self.path.unlink()
                needed = f"a file of {byte_size(self.size)} for a checkpoint in memory does not fit"
                where = f"{self.path.parent}, where {free} are free"
                raise SharedMemoryError(f"{needed} into {where}") from error
        self.buffer = torch.empty(0, dtype=torch.uint8)
        if self.size:
            self.buffer = torch.from_file(str(self.path), True, self.size, dtype=torch.uint8)
        self.staging = Staging(self.buffer)

    def pin(self) -> None:
        pin_memory(self.buffer.data_ptr(), self.buffer.nbytes)

    def close(self, pinned: bool) -> None:
        if pinned:
            unpin_memory(self.buffer.data_ptr())
        self.path.unlink(missing_ok=True)


class MemoryWriter:
    """A writer of this rank's share of the checkpoints in memory; all ranks call it at the same steps.

    Args:
        order: the agent's order, with its folder and the other host.
    """

    def __init__(self, order: MemoryOrder, rank: int, report: Callable[[str], None]) -> None:
        self._order, self._rank, self._report = order, rank, report
        self._count = 0
        self._slots: list[_Slot] = []
        """At most two, the oldest first."""
        self._size = 0
        self._names: tuple[str, ...] = ()
        self._shares: Shares | None = None
        self._index = ""
        self._pinned = False
        self._peer: PeerFiles | None = None
        self._peer_lost = False
        self._writing: Future[None] | None = None

    def begin(self, state: State, manifest: dict[str, Any]) -> None:
        """Write the present state, while the training continues; the one before it is complete.

        Raises:
            SharedMemoryError: the shared memory is too small.
        """
        self.settle()
        if self._shares is None or self._names != tuple(state):
            self._divide(state)
        assert self._shares is not None
        slot = self._oldest_slot()
        # Until the new one is complete, only the file of the other slot counts.
        self._committed(slot).unlink(missing_ok=True)
        slot.staging.copy({name: _local(state[name]) for name in self._shares.local})
        self._writing = in_thread(partial(self._complete, slot, self._count, manifest))
        self._count += 1

    def _oldest_slot(self) -> _Slot:
        """Return the file to overwrite; the second one is made once a new state is complete on all ranks.

        By then no rank needs the state that the attempt began with, whose files are removed here.
        """
        if len(self._slots) == 2:
            self._slots.reverse()
            return self._slots[1]
        folder = Path(self._order.folder)
        if self._slots:
            for path in folder.glob("*-*-*-*.*"):
                if int(path.name.partition("-")[0]) < self._order.attempt:
                    path.unlink(missing_ok=True)
        path = folder / file_name(self._order, self._rank, len(self._slots))
        self._slots.append(_Slot(path, self._size))
        if self._pinned:
            self._slots[-1].pin()
        return self._slots[-1]

    def forget(self) -> None:
        """Give up all states so far: the training returns to a checkpoint on disk from before them."""
        self.settle()
        for slot in self._slots:
            self._committed(slot).unlink(missing_ok=True)
            if self._peer is not None and not self._peer_lost:
                self._peer.remove(self._committed(slot).name)

    def hold(self) -> None:
        """Wait until weights and moments may change."""
        for slot in self._slots:
            slot.staging.hold()

    def settle(self) -> None:
        """Wait until the state in progress is complete, on this host and on its peer."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _complete(self, slot: _Slot, count: int, manifest: dict[str, Any]) -> None:
        assert self._shares is not None
        slot.staging.fill()
        data = memoryview(slot.buffer.numpy())  # type: ignore[arg-type]
        order = self._order
        about = {
            "attempt": order.attempt,
            "node": order.node,
            "nodes": order.nodes,
            "rank": self._rank,
            "ranks": order.ranks,
            "count": count,
            "step": manifest["step"],
            "covers": self._shares.covers,
            "bytes": slot.size,
            "file": slot.path.name,
            "sum": xxhash.xxh3_128_hexdigest(data),
            "manifest": manifest,
        }
        text = f'{json.dumps(about)[:-1]}, "tensors": {self._index}}}'
        write_committed(self._committed(slot), text)
        if order.peer is not None and not self._shares.is_covered and not self._peer_lost:
            self._send(slot, data, text)

    def _send(self, slot: _Slot, data: memoryview, text: str) -> None:
        peer = self._order.peer
        assert peer is not None
        try:
            if self._peer is None:
                self._peer = PeerFiles(peer.address, peer.port, bytes.fromhex(self._order.key))
            self._peer.remove(self._committed(slot).name)
            self._peer.write(slot.path.name, data)
            self._peer.write(self._committed(slot).name, text.encode())
        except OSError as error:  # if the host is lost, the launcher ends this attempt
            self._peer_lost = True
            self._report(f"no further copies are sent to {peer.host}: {error}")

    @staticmethod
    def _committed(slot: _Slot) -> Path:
        return slot.path.with_suffix(".json")

    def _divide(self, state: State) -> None:
        """Decide with all ranks which rank writes which tensors, and begin new files."""
        for slot in self._slots:
            self._committed(slot).unlink(missing_ok=True)
            slot.close(self._pinned)
        boxes = {name: boxes_of(value) for name, value in state.items()}
        sizes = {name: _local_size(value) for name, value in state.items()}
        self._names = tuple(state)
        held = process_group.gather((self._order.node, [(n, boxes[n], sizes[n]) for n in state]))
        self._shares = divide(held, process_group.rank())
        local = self._shares.local
        starts = [*accumulate((_aligned(sizes[name]) for name in local), initial=0)]
        self._index = json.dumps({
            name: {
                "dtype": str(state[name].dtype).removeprefix("torch."),
                "shape": list(state[name].shape),
                "boxes": [[box.offsets, box.sizes] for box in boxes[name]],
                "start": start,
            }
            for name, start in zip(local, starts, strict=False)
        })  # fmt: skip
        self._slots, self._size = [], starts[-1]
        self._pinned = any(_local(state[name]).is_cuda for name in local)


def divide(held: list[tuple[int, list[tuple[str, Boxes, int]]]], rank: int) -> Shares:
    """Return the share of a rank, so that the ranks of a host write about the same number of bytes.

    Args:
        held: of each rank, the number of its host, and the name, the boxes and the bytes of its tensors.
    """
    node = held[rank][0]
    holders: dict[tuple[str, Boxes], list[int]] = {}
    bytes_of: dict[tuple[str, Boxes], int] = {}
    keys: dict[int, set[tuple[str, Boxes]]] = {}
    for holder, (its_node, tensors) in enumerate(held):
        keys.setdefault(its_node, set()).update((name, boxes) for name, boxes, _ in tensors)
        if its_node == node:
            for name, boxes, size in tensors:
                holders.setdefault((name, boxes), []).append(holder)
                bytes_of[name, boxes] = size
    load: Counter[int] = Counter()
    local = []
    for name, boxes in sorted(holders, key=lambda it: (-bytes_of[it], it[0])):
        writer = min(holders[name, boxes], key=lambda it: (load[it], it))
        load[writer] += bytes_of[name, boxes]
        if writer == rank and bytes_of[name, boxes]:
            local.append(name)
    covers = tuple(sorted(other for other in keys if keys[other] <= keys[node]))
    is_covered = any(keys[node] <= keys[other] for other in keys if other != node)
    return Shares(tuple(local), covers, is_covered)


def boxes_of(value: Tensor) -> Boxes:
    """Return the parts of the whole tensor that this rank holds, in their order in memory."""
    if isinstance(value, FlatShard):
        return tuple(box for box, _ in value.boxes_with_starts())
    if isinstance(value, DTensor):
        return (Box(*local_region(value)),)
    return (Box.whole(tuple(value.shape)),)


def _local(value: Tensor) -> Tensor:
    """Return the elements of this rank's memory, computed if they are not stored as such."""
    if isinstance(value, FlatShard):
        return value.local
    return (value.to_local() if isinstance(value, DTensor) else value).detach()


def _local_size(value: Tensor) -> int:
    count = value.count if isinstance(value, FlatShard) else _local(value).numel()
    return count * value.dtype.itemsize


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def in_thread(action: Callable[[], T]) -> Future[T]:
    """Run `action` in a daemon thread, which does not keep a failing process alive."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(action())
        except BaseException as error:
            outcome.set_exception(error)

    Thread(target=run, name="checkpoint", daemon=True).start()
    return outcome
