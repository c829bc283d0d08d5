"""Shared elements of the pictures of a plan. Their colours are the page's, see `html`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape

TICKS = 4
"""The approximate number of ticks on an axis."""


def picture(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    """Return one `<svg>` element."""
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="picture" role="img" {size}>'
    return "\n".join([head, f"<title>{escape(title)}</title>", *parts, "</svg>"])


def text(x: float, y: float, words: str, anchor: str = "start") -> str:
    """Return a text at a point; `anchor` is the end of the text that is at the point."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def box(x: float, y: float, width: float, height: float, colour: str, hint: str = "") -> str:
    """Return a rectangle with a hover text."""
    place = f'x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"'
    return f'<rect {place} fill="{colour}"><title>{escape(hint)}</title></rect>'


def dot(x: float, y: float, radius: float, kind: str, hint: str) -> str:
    place = f'cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}"'
    return f'<circle {place} class="{kind}"><title>{escape(hint)}</title></circle>'


def ticks(low: float, high: float) -> list[float]:
    """Return about `TICKS` round values; the first is at most `low`, the last at least `high`."""
    step = round_step((high - low) or abs(high) or 1.0)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * place for place in range(first, max(last, first + 1) + 1)]


def round_step(span: float) -> float:
    """Return 1, 2 or 5 times a power of ten, about a `TICKS`-th of the range."""
    rough = span / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= rough * 0.999)
