"""Checkpoints in the shared memory of hosts, which outlives the ranks: `checkpoint.memory_every`.

Each host keeps the state of its ranks in files of its agent's folder, two of each rank, so that one is complete
while the other is written. A tensor that several ranks of a host hold is written by one of them. Each rank then
sends its file to the agent of another host, unless another host holds the same tensors in any case.

A file is filled while the next step is computed, and it is complete before the ranks compute the norm of that
step. So no rank can begin to overwrite a state before all ranks have completed the next one.
"""

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.cuda._pin_memory_utils import pin_memory, unpin_memory
from torch.distributed.tensor import DTensor

from nanoscale.checkpoint.flat import Box, FlatShard
from nanoscale.checkpoint.staging import Staging, State, aligned, in_thread
from nanoscale.common.units import byte_size
from nanoscale.models.initialization import local_region
from nanoscale.parallel import process_group
from nanoscale.processes.peer_files import COMMITTED, PeerFiles, write_committed
from nanoscale.runs.memory_order import MemoryOrder, file_name, index_with_sum

Boxes = tuple[Box, ...]
Part = tuple[str, Boxes, int]
"""A tensor of a rank: its name, its boxes and its bytes."""
_COPIED_AT_ONCE = 1 << 24
"""Bytes; a copy in host memory that is smaller takes less time than the switches to another thread."""


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


class _Slot:
    """A file of this rank's tensors, mapped into memory."""

    def __init__(self, path: Path, size: int, is_pinned: bool) -> None:
        self.path, self.size, self._is_pinned = path, size, is_pinned
        self.committed = path.with_suffix(COMMITTED)
        with path.open("wb") as file:
            try:
                # A write into the mapped file without enough shared memory would end the process.
                os.posix_fallocate(file.fileno(), 0, max(1, size))
            except OSError as error:
                free = byte_size(shutil.disk_usage(path.parent).free)
                path.unlink()
                needed = f"a file of {byte_size(size)} for a checkpoint in memory does not fit"
                where = f"{path.parent}, where {free} are free"
                raise SharedMemoryError(f"{needed} into {where}") from error
        shared = partial(torch.from_file, str(path), True) if size else torch.empty
        self.buffer = shared(size, dtype=torch.uint8)
        self.staging = Staging(self.buffer)
        if is_pinned:
            pin_memory(self.buffer.data_ptr(), size)

    def remove(self) -> None:
        self.committed.unlink(missing_ok=True)
        if self._is_pinned:
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
        self._shares = Shares((), (), False)
        self._index = ""
        self._pinned = False
        self._peer: PeerFiles | None = None
        self._peer_lost = order.peer is None
        self._writing: Future[None] | None = None
        self._next: Future[_Slot] | None = None
        """A file that is being made."""

    def prepare(self, state: Callable[[], State]) -> None:
        """Begin to make the file of the next checkpoint, if it can be made; all ranks call it after a step."""
        if not self._names:
            self._divide(state())
        if len(self._slots) < 2 and self._writing is None:
            self._next = self._next or self._begin_slot()

    def begin(self, state: State, manifest: dict[str, Any]) -> None:
        """Write the present state, while the training continues; the one before it is complete.

        Raises:
            SharedMemoryError: the shared memory is too small.
        """
        self.settle()
        if self._names != tuple(state):
            self._divide(state)
        slot = self._next_slot()
        # Until the new one is complete, only the file of the other slot counts.
        slot.committed.unlink(missing_ok=True)
        slot.staging.copy({name: _local(state[name]) for name in self._shares.local})
        if self._size < _COPIED_AT_ONCE and not self._pinned:
            slot.staging.fill()
        self._writing = in_thread(partial(self._complete, slot, self._count, manifest))
        self._count += 1

    def _next_slot(self) -> _Slot:
        """Return the file to overwrite: the oldest one if there are two."""
        if len(self._slots) == 2:
            self._slots.reverse()
        else:
            making, self._next = self._next or self._begin_slot(), None
            self._slots.append(making.result())
        return self._slots[-1]

    def _begin_slot(self) -> Future[_Slot]:
        """Make a file in another thread; the second one once a new state is complete on all ranks.

        By then no rank needs the state that the attempt began with, whose files are removed here.
        """
        folder = Path(self._order.folder)
        if self._slots:
            for path in folder.glob("*-*-*-*.*"):
                if int(path.name.partition("-")[0]) < self._order.attempt:
                    path.unlink(missing_ok=True)
        path = folder / file_name(self._order, self._rank, len(self._slots))
        return in_thread(partial(_Slot, path, self._size, self._pinned))

    def forget(self) -> None:
        """Give up all states so far: the training returns to a checkpoint on disk from before them."""
        self.settle()
        for slot in self._slots:
            slot.committed.unlink(missing_ok=True)
            if self._peer is not None and not self._peer_lost:
                self._peer.remove(slot.committed.name)

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
        index = index_with_sum(f'{json.dumps(about)[:-1]}, "tensors": {self._index}}}')
        write_committed(slot.committed, index)
        if not self._shares.is_covered and not self._peer_lost:
            self._send(slot, data, index)

    def _send(self, slot: _Slot, data: memoryview, index: bytes) -> None:
        peer = self._order.peer
        assert peer is not None
        try:
            if self._peer is None:
                self._peer = PeerFiles(peer.address, peer.port, bytes.fromhex(self._order.key))
            self._peer.remove(slot.committed.name)
            self._peer.write(slot.path.name, data)
            self._peer.write(slot.committed.name, index)
        except OSError as error:  # if the host is lost, the launcher ends this attempt
            self._peer_lost = True
            self._report(f"no further copies are sent to {peer.host}: {error}")

    def _divide(self, state: State) -> None:
        """Decide with all ranks which rank writes which tensors, and begin new files."""
        if self._next is not None:
            self._next_slot()
        for slot in self._slots:
            slot.remove()
        self._names = tuple(state)
        parts = {}
        for name, value in state.items():
            boxes = boxes_of(value)
            count = sum(prod(box.sizes) for box in boxes)
            parts[name] = name, boxes, count * value.dtype.itemsize
        held = process_group.gather((self._order.node, [*parts.values()]))
        self._shares = divide(held, process_group.rank())
        local = self._shares.local
        starts = [*accumulate((aligned(parts[name][2]) for name in local), initial=0)]
        self._index = json.dumps({
            name: {
                "dtype": str(state[name].dtype).removeprefix("torch."),
                "shape": list(state[name].shape),
                "boxes": [[box.offsets, box.sizes] for box in parts[name][1]],
                "start": start,
            }
            for name, start in zip(local, starts, strict=False)
        })  # fmt: skip
        self._slots, self._size = [], starts[-1]
        self._pinned = any(_local(state[name]).is_cuda for name in local)


def divide(held: list[tuple[int, list[Part]]], rank: int) -> Shares:
    """Return the share of a rank, so that the ranks of a host write about the same number of bytes.

    Args:
        held: of each rank, the number of its host, and its tensors.
    """
    node = held[rank][0]
    holders: dict[Part, list[int]] = {}
    keys: dict[int, set[Part]] = {}
    for holder, (its_node, parts) in enumerate(held):
        keys.setdefault(its_node, set()).update(parts)
        for part in parts if its_node == node else ():
            holders.setdefault(part, []).append(holder)
    load: Counter[int] = Counter()
    local = []
    for name, boxes, size in sorted(holders, key=lambda it: (-it[2], it[0])):
        writer = min(holders[name, boxes, size], key=lambda it: (load[it], it))
        load[writer] += size
        if writer == rank and size:
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
