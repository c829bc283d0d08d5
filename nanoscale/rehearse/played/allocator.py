"""PyTorch's caching allocator: the segments that it reserves on a GPU, and the blocks of tensors in them.

Sizes and rules are from c10/cuda/CUDACachingAllocator.cpp with its default settings. Every stream has
separate pools. Segments are never released: PyTorch releases them only when the device is full.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from nanoscale.rehearse.played.record import PACKAGE, calling_frames

GRANULE = 512
"""The sizes of tensors are rounded up to a multiple of these bytes."""
_MIB = 1 << 20
_SMALL, _SMALL_SEGMENT = _MIB, 2 * _MIB
"""Tensors of at most the first number of bytes share segments of the second."""
_MIDDLE, _MIDDLE_SEGMENT = 10 * _MIB, 20 * _MIB
"""Larger tensors below the first number of bytes share segments of the second.

Every tensor above this has its own segment. The segment's size is a multiple of 2 MiB.
"""
_BASE = 0x7F0000000000
"""The address of the first segment in a snapshot."""
Frames = list[dict[str, Any]]
Event = dict[str, Any]


def rounded(size: int) -> int:
    """Return the bytes that the allocator uses for a tensor of `size` bytes."""
    return -(-size // GRANULE) * GRANULE


@dataclass(eq=False, slots=True)
class _Block:
    """A range of a segment that holds one tensor or is free."""

    pool: tuple[int, bool]
    """The stream, and True for small tensors."""
    address: int
    size: int
    free: bool = True
    before: _Block | None = None
    after: _Block | None = None
    segment: int = 0
    """The bytes of the segment if this is its first block; else 0."""


class Allocator:
    """The reserved memory of one GPU."""

    def __init__(self) -> None:
        self.reserved = 0
        """Bytes of all segments."""
        self.segments: list[_Block] = []
        """The first block of each segment."""
        self._next = 0
        self._used: dict[int, _Block] = {}
        self._free: dict[tuple[int, bool], list[tuple[int, int]]] = defaultdict(list)
        """The size and the address of each free block in order, by pool."""
        self._at: dict[int, _Block] = {}

    def allocate(self, key: int, size: int, stream: int) -> int | None:
        """Allocate the rounded bytes of a tensor; return the address, or None if the size is 0."""
        if size == 0:
            return None
        pool = (stream, size <= _SMALL)
        free = self._free[pool]
        index = bisect_left(free, (size, 0))
        if index < len(free):
            block = self._at[free.pop(index)[1]]
        else:
            block = self._reserve(pool, size)
        block.free = False
        rest = block.size - size
        if rest >= GRANULE if pool[1] else rest > _SMALL:
            self._split(block, size)
        self._used[key] = block
        return block.address

    def size_at(self, address: int) -> int:
        return self._at[address].size

    def free(self, key: int) -> int | None:
        """Free a tensor's memory; return its address, or None if it had none."""
        block = self._used.pop(key, None)
        if block is None:
            return None
        address = block.address
        block.free = True
        for other in (block.before, block.after):
            if other is not None and other.free:
                self._remove(other)
        if block.before is not None and block.before.free:
            block = self._merge(block.before, block)
        if block.after is not None and block.after.free:
            block = self._merge(block, block.after)
        insort(self._free[block.pool], (block.size, block.address))
        return address

    def _reserve(self, pool: tuple[int, bool], size: int) -> _Block:
        segment = _SMALL_SEGMENT if size <= _SMALL else _MIDDLE_SEGMENT
        if size >= _MIDDLE:
            segment = -(-size // _SMALL_SEGMENT) * _SMALL_SEGMENT
        block = _Block(pool, self._next, segment, segment=segment)
        self.segments.append(block)
        self._at[block.address] = block
        self._next += segment + _SMALL_SEGMENT
        self.reserved += segment
        return block

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(block.pool, block.address + size, block.size - size, True, block, block.after)
        if block.after is not None:
            block.after.before = rest
        block.size, block.after = size, rest
        self._at[rest.address] = rest
        insort(self._free[rest.pool], (rest.size, rest.address))

    def _merge(self, first: _Block, second: _Block) -> _Block:
        del self._at[second.address]
        first.size += second.size
        first.after, first.free = second.after, True
        if second.after is not None:
            second.after.before = first
        return first

    def _remove(self, block: _Block) -> None:
        free = self._free[block.pool]
        del free[bisect_left(free, (block.size, block.address))]


class MemoryHistory:
    """The events of every segment and tensor of an allocator, each with nanoscale's frames that caused it."""

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self._events: list[Event] = []
        self._held: dict[int, Event] = {}
        """The event that allocated each tensor, by its address."""
        self._segments = 0
        self._frames: dict[tuple[int, ...], Frames] = {}

    def change(self, freed: int | None, allocated: int | None, stream: int, kind: str) -> None:
        """Record that a tensor's memory was freed, allocated or both; an address is None if it was not.

        Args:
            kind: of the tensor. When memory is freed it replaces the kind that was recorded first.
        """
        if freed is not None:
            event = self._held.pop(freed)
            event["category"] = kind
            for action in ("free_requested", "free_completed"):
                self._record(action, freed, event["size"], event["stream"], event["frames"])
        if allocated is not None:
            self._allocate(allocated, stream, kind)

    def _allocate(self, address: int, stream: int, kind: str) -> None:
        frames = self._caller()
        for first in self._allocator.segments[self._segments :]:
            self._record("segment_alloc", first.address, first.segment, stream, frames)
        self._segments = len(self._allocator.segments)
        size = self._allocator.size_at(address)
        self._held[address] = self._record("alloc", address, size, stream, frames, kind)

    def _record(
        self, action: str, address: int, size: int, stream: int, frames: Frames, kind: str = ""
    ) -> Event:
        event = {
            "action": action,
            "addr": _BASE + address,
            "size": size,
            "stream": stream,
            "frames": frames,
            "time_us": len(self._events),
            **({"category": kind} if kind else {}),
        }
        self._events.append(event)
        return event

    def _caller(self) -> Frames:
        """Return the running lines of nanoscale's code, the innermost first."""
        lines = [
            (frame.f_code, frame.f_lineno)
            for frame in calling_frames()
            if frame.f_code.co_filename.startswith(PACKAGE)
        ]
        key = tuple(number for code, line in lines for number in (id(code), line))
        if key not in self._frames:
            self._frames[key] = [
                {"filename": code.co_filename, "line": line, "name": code.co_name}
                for code, line in lines
            ]
        return self._frames[key]

    def snapshot(self) -> dict[str, Any]:
        """Return the segments as they are now, and all events."""
        return {
            "segments": [self._segment(first) for first in self._allocator.segments],
            "device_traces": [self._events],
        }

    def _segment(self, first: Any) -> dict[str, Any]:
        blocks, block, used = [], first, 0
        while block is not None:
            event = None if block.free else self._held.get(block.address)
            used += 0 if event is None else block.size
            blocks.append(
                {
                    "address": _BASE + block.address,
                    "size": block.size,
                    "requested_size": block.size,
                    "state": "inactive" if event is None else "active_allocated",
                    "frames": [] if event is None else event["frames"],
                }
            )
            block = block.after
        stream, small = first.pool
        return {
            "device": 0,
            "address": _BASE + first.address,
            "total_size": first.segment,
            "stream": stream,
            "segment_type": "small" if small else "large",
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "allocated_size": used,
            "active_size": used,
            "requested_size": used,
            "frames": [],
            "blocks": blocks,
        }
