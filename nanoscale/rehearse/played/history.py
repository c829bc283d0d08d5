"""The history of a GPU's memory, in the form of torch.cuda.memory._snapshot(), for pytorch.org/memory_viz."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from nanoscale.rehearse.played.allocator import Allocator

_BASE = 0x7F0000000000
"""The address of the first segment."""
_PACKAGE = str(Path(__file__).parents[2])
_HERE = str(Path(__file__).parents[1])
Frames = list[dict[str, Any]]
Event = dict[str, Any]


class MemoryHistory:
    """Every segment and tensor of an allocator, with the lines of nanoscale's code that asked for it."""

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self._events: list[Event] = []
        self._held: dict[int, Event] = {}
        """The event that allocated each tensor, by its address."""
        self._segments = 0
        self._frames: dict[tuple[int, ...], Frames] = {}

    def change(self, freed: int | None, allocated: int | None, stream: int, kind: str) -> None:
        """Record that a tensor was freed and allocated: its address before and after, None if there is none."""
        if freed is not None:
            self._free(freed, kind)
        if allocated is not None:
            self._allocate(allocated, stream, kind)

    def _allocate(self, address: int, stream: int, kind: str) -> None:
        frames = self._caller()
        for first in self._allocator.segments[self._segments :]:
            self._note("segment_alloc", first.address, first.segment, stream, frames)
        self._segments = len(self._allocator.segments)
        size = self._allocator.size_at(address)
        self._held[address] = self._note("alloc", address, size, stream, frames, kind)

    def _free(self, address: int, kind: str) -> None:
        event = self._held.pop(address)
        event["category"] = kind  # which is known better than at first
        for action in ("free_requested", "free_completed"):
            self._note(action, address, event["size"], event["stream"], event["frames"])

    def _note(
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
        """Return the lines of nanoscale's code that are running, the innermost first."""
        lines, frame = [], sys._getframe(3)
        while frame is not None:
            file = frame.f_code.co_filename
            if file.startswith(_PACKAGE) and not file.startswith(_HERE):
                lines.append((frame.f_code, frame.f_lineno))
            frame = frame.f_back  # type: ignore[assignment]
        key = tuple(part for code, line in lines for part in (id(code), line))
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
