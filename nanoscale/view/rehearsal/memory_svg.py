"""The memory of a rehearsed rank as SVG: in the course of a step, and by phase and purpose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nanoscale.common.units import byte_size
from nanoscale.view.svg import box, line, picture, text

_WIDTH, _HEIGHT = 960, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 90, 20, 20, 24
_ROW, _GAP = 22, 6
_COLOURS = {
    "weights": "#4c78a8",
    "gathered weights": "#9ecae9",
    "gradients": "#54a24b",
    "optimizer": "#eeca3b",
    "activations": "#b279a2",
    "communication": "#f58518",
    "temporary": "#bab0ac",
}


def timeline_svg(values: Sequence[int], capacity: int | None) -> str:
    """Return the bytes that tensors hold in the course of a step, and the device's capacity if it is near."""
    highest = max([*values, 1])
    near = capacity is not None and capacity < 3 * highest
    top = max(highest, capacity) if near and capacity is not None else highest
    bottom, width = _HEIGHT - _BOTTOM, _WIDTH - _LEFT - _RIGHT

    def y(size: float) -> float:
        return bottom - (bottom - _TOP) * size / top

    across = width / max(1, len(values) - 1)
    points = " ".join(f"{_LEFT + at * across:.1f},{y(size):.1f}" for at, size in enumerate(values))
    parts = []
    for tick in range(5):
        size = top * tick / 4
        parts.append(line(_LEFT, y(size), _WIDTH - _RIGHT, y(size), "grid"))
        parts.append(text(_LEFT - 8, y(size) + 4, byte_size(size), "end"))
    parts.append(f'<polyline points="{points}" class="curve"/>')
    if near and capacity is not None:
        parts.append(line(_LEFT, y(capacity), _WIDTH - _RIGHT, y(capacity), "limit"))
    parts.append(text(_LEFT, _HEIGHT - 6, "begin of the step"))
    parts.append(text(_WIDTH - _RIGHT, _HEIGHT - 6, "end of the step", "end"))
    return picture(_WIDTH, _HEIGHT, "Memory in the course of a step", parts)


def phases_svg(phases: dict[str, Any]) -> str:
    """Return a bar for each phase's peak; hovering over a part shows its size."""
    scale = (_WIDTH - _LEFT - 90) / max([1, *(phase["peak"] for phase in phases.values())])
    parts, top = [], _TOP
    for name, phase in phases.items():
        parts.append(text(_LEFT - 8, top + 16, name, "end"))
        left = float(_LEFT)
        for kind, size in phase["kinds"].items():
            parts.append(
                box(left, top, size * scale, _ROW, _COLOURS[kind], f"{kind}: {byte_size(size)}")
            )
            left += size * scale
        parts.append(text(left + 6, top + 16, byte_size(phase["peak"])))
        top += _ROW + _GAP
    left, used = (
        float(_LEFT),
        {k for p in phases.values() for k, size in p["kinds"].items() if size},
    )
    for kind, colour in _COLOURS.items():
        if kind in used:
            parts += [box(left, top + 6, 12, 12, colour, kind), text(left + 17, top + 16, kind)]
            left += 34 + 6 * len(kind)
    return picture(_WIDTH, top + 30, "Peaks of memory by phase and purpose", parts)
