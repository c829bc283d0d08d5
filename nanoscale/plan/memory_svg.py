"""Memory as SVG: a bar a pipeline rank, a colour for each part, against what the device has."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from nanoscale.plan.memory import RankMemory
from nanoscale.plan.memory_text import LOOKS, shown
from nanoscale.plan.part import GIB

_ROW, _GAP = 22, 6
_LEFT, _RIGHT, _TOP = 62, 76, 22
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
    """One `<svg>` element; a mouse over a part shows its size and arithmetic."""
    worst = max(memory, key=lambda rank: rank.total)
    scale = (width - _LEFT - _RIGHT) / max(capacity, worst.total)
    rows = shown(memory, worst)
    bottom = _TOP + len(rows) * (_ROW + _GAP)
    bars = [
        _bar(memory[number], _TOP + place * (_ROW + _GAP), scale)
        if number is not None
        else f'<text x="4" y="{_TOP + place * (_ROW + _GAP) + 16}">…</text>'
        for place, number in enumerate(rows)
    ]
    limit = _LEFT + capacity * scale
    mark = (
        f'<line x1="{limit:.1f}" x2="{limit:.1f}" y1="{_TOP - 6}" y2="{bottom}" class="limit"/>'
        f'<text x="{limit:.1f}" y="{_TOP - 9}" text-anchor="end">{capacity / GIB:.1f} GiB of the device</text>'
    )
    legend, height = _legend(memory, bottom + 12, width)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" class="picture"><title>Memory of every pipeline rank</title>',
            *bars,
            mark,
            legend,
            "</svg>",
        ]
    )


def _bar(rank: RankMemory, top: int, scale: float) -> str:
    boxes = [f'<text x="4" y="{top + 16}">rank {rank.rank}</text>']
    left = float(_LEFT)
    for part in rank.parts:
        wide = part.bytes * scale
        hint = escape(f"{part.name}: {part.bytes / GIB:.3f} GiB = {part.how}")
        boxes.append(
            f'<rect x="{left:.2f}" y="{top}" width="{wide:.2f}" height="{_ROW}" fill="{_COLOURS[part.name]}">'
            f"<title>{hint}</title></rect>"
        )
        left += wide
    boxes.append(f'<text x="{left + 6:.1f}" y="{top + 16}">{rank.total / GIB:.1f} GiB</text>')
    return "\n".join(boxes)


def _legend(memory: Sequence[RankMemory], top: int, width: int) -> tuple[str, int]:
    """The entries, and where they end."""
    left, entries = _LEFT, []
    for name in LOOKS:
        if not any(rank.part(name).bytes for rank in memory):
            continue
        wide = 30 + 7 * len(name)
        if left + wide > width:
            left, top = _LEFT, top + 20
        entries.append(
            f'<rect x="{left}" y="{top}" width="12" height="12" fill="{_COLOURS[name]}"/>'
            f'<text x="{left + 17}" y="{top + 10}">{escape(name)}</text>'
        )
        left += wide
    return "\n".join(entries), top + 24
