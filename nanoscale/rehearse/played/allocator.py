"""PyTorch's caching allocator: the segments that it reserves on a GPU for the tensors that it gives out.

Sizes and rules are those of c10/cuda/CUDACachingAllocator.cpp with its default settings. Every stream has
pools of its own. Segments are never returned, since that happens only when the device is full.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass

GRANULE = 512
"""Bytes that a tensor's size is rounded up to."""
_MIB = 1 << 20
_SMALL, _SMALL_SEGMENT = _MIB, 2 * _MIB
"""Tensors up to the first share segments of the second."""
_MIDDLE, _MIDDLE_SEGMENT = 10 * _MIB, 20 * _MIB
"""Larger ones below the first share segments of the second; those above have segments of whole 2 MiB."""


def rounded(size: int) -> int:
    """Return the bytes that a tensor of `size` bytes takes."""
    return -(-size // GRANULE) * GRANULE


@dataclass(eq=False, slots=True)
class _Block:
    pool: tuple[int, bool]
    address: int
    size: int
    free: bool = True
    before: _Block | None = None
    after: _Block | None = None
    segment: int = 0
    """Bytes of the segment that begins with it; 0 in the middle of one."""


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
        """Size and address of free blocks, by stream and whether tensors are small."""
        self._at: dict[int, _Block] = {}

    def take(self, key: int, size: int, stream: int) -> int | None:
        """Give memory to a tensor; `size`: rounded bytes. Return its address, or None if it is empty."""
        if size == 0:
            return None
        pool = (stream, size <= _SMALL)
        free = self._free[pool]
        place = bisect_left(free, (size, 0))
        if place < len(free):
            block = self._at[free.pop(place)[1]]
        else:
            block = self._reserve(pool, size)
        block.free = False
        rest = block.size - size
        if rest >= GRANULE if pool[1] else rest > _SMALL:
            self._split(block, size)
        self._used[key] = block
        return block.address

    def size_at(self, address: int) -> int:
        """Return the bytes of the block at an address."""
        return self._at[address].size

    def give(self, key: int) -> int | None:
        """Take a tensor's memory back; return its address, or None if it had none."""
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
        segment = _SMALL_SEGMENT
        if size > _SMALL:
            segment = (
                _MIDDLE_SEGMENT if size < _MIDDLE else -(-size // _SMALL_SEGMENT) * _SMALL_SEGMENT
            )
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
