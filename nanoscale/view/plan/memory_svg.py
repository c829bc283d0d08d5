"""Memory as SVG: a bar per pipeline rank, a colour for each part, compared with the device's capacity."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nanoscale.common.units import byte_size
from nanoscale.plan.memory.peak import RankMemory
from nanoscale.view.plan.memory_text import LOOKS, shown
from nanoscale.view.svg import box, line, picture, text

_ROW, _GAP = 22, 6
_LEFT, _RIGHT, _TOP = 62, 76, 22
_TOTAL = 64
"""Pixels for a bar's size behind it."""
_COLOURS = {
    "weights": "#4c78a8",
    "compute copies": "#72b7b2",
    "gradients": "#54a24b",
    "optimizer": "#eeca3b",
    "units in flight": "#9ecae9",
    "activations": "#b279a2",
    "logits and loss": "#e45756",
    "communication buffers": "#f58518",
    "fragmentation": "#bab0ac",
    "context": "#79706e",
}


def memory_svg(memory: Sequence[RankMemory], capacity: int, width: int = 960) -> str:
    """Return one `<svg>` element; hovering over a part shows its size and arithmetic."""
    worst = max(memory, key=lambda rank: rank.total)
    scale = (width - _LEFT - _RIGHT) / max(capacity, worst.total)
    parts: list[str] = []
    top = _TOP
    limit = _LEFT + capacity * scale
    for number in shown(memory, worst):
        if number is None:
            parts.append(text(4, top + 16, "…"))
        else:
            parts += _bar(memory[number], top, scale, limit)
        top += _ROW + _GAP
    parts.append(line(limit, _TOP - 6, limit, top, "limit"))
    anchor = "end" if limit > 2 * _LEFT else "start"
    parts.append(text(limit, _TOP - 9, f"{byte_size(capacity)} of the device", anchor))
    entries, height = _legend(memory, top + 12, width)
    return picture(width, height, "Memory of every pipeline rank", [*parts, *entries])


def _bar(rank: RankMemory, top: int, scale: float, limit: float) -> Iterator[str]:
    yield text(4, top + 16, f"rank {rank.rank}")
    left = float(_LEFT)
    for part in rank.parts:
        hint = f"{part.name}: {byte_size(part.bytes)} = {part.how}"
        yield box(left, top, part.bytes * scale, _ROW, _COLOURS[part.name], hint)
        left += part.bytes * scale
    if left <= limit < left + _TOTAL:  # the size would overlap the device's end
        left = limit
    yield text(left + 6, top + 16, byte_size(rank.total))


def _legend(memory: Sequence[RankMemory], top: int, width: int) -> tuple[list[str], int]:
    """Return the entries of the legend, and its lower end."""
    left, entries = _LEFT, []
    for name in LOOKS:
        if not any(rank.part(name).bytes for rank in memory):
            continue
        wide = 34 + 6 * len(name)
        if left + wide > width:
            left, top = _LEFT, top + 20
        entries += [box(left, top, 12, 12, _COLOURS[name], name), text(left + 17, top + 10, name)]
        left += wide
    return entries, top + 24
