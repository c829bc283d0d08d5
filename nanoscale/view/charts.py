"""Charts: curves and scatters as SVG, whose colors are in `style.css`, and a curve as a line of text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from nanoscale.view.blocks import escape

if TYPE_CHECKING:
    from rich.text import Text

Curve = list[tuple[int, float | None]]
"""Steps and values; None is a value that was not finite."""
Point = tuple[float, float, str]
"""A point of a scatter, and its hover text."""

_TICKS = 4
"""The approximate number of ticks on an axis."""
_BLOCKS = "▁▂▃▄▅▆▇█"


# --- elements -------------------------------------------------------------------------------------


def picture(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    """Return one `<svg>` element."""
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="picture" role="img" {size}>'
    return "\n".join([head, f"<title>{escape(title)}</title>", *parts, "</svg>"])


def text(x: float, y: float, label: str, anchor: str = "start") -> str:
    """Return a text at a point; `anchor` is the end of the text that is at the point."""
    return f'<text x="{number(x)}" y="{number(y)}" text-anchor="{anchor}">{escape(label)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    ends = f'x1="{number(x1)}" y1="{number(y1)}" x2="{number(x2)}" y2="{number(y2)}"'
    return f'<line {ends} class="{kind}"/>'


def dot(x: float, y: float, radius: float, kind: str, hint: str) -> str:
    centre = f'cx="{number(x)}" cy="{number(y)}" r="{radius:g}"'
    return f'<circle {centre} class="{kind}"><title>{escape(hint)}</title></circle>'


def polyline(points: Iterable[tuple[float, float]], kind: str) -> str:
    joined = " ".join(f"{number(x)},{number(y)}" for x, y in points)
    return f'<polyline points="{joined}" class="{kind}"/>'


def number(value: float) -> str:
    """Format a coordinate to a hundredth of a pixel, without trailing zeros."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


# --- axes -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Axis:
    """A scale from values to pixels."""

    low: float
    high: float
    start: float
    """Pixels of `low`."""
    end: float
    """Pixels of `high`."""
    logarithmic: bool = False

    def at(self, value: float) -> float:
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = map(math.log10, (low, high, value))
        return self.start + (value - low) / ((high - low) or 1.0) * (self.end - self.start)


def _horizontal_grid(x: Axis, y: Axis, marks: Iterable[float]) -> Iterator[str]:
    for mark in marks:
        yield line(x.start, y.at(mark), x.end, y.at(mark), "grid")
        yield text(x.start - 6, y.at(mark) + 4, label(mark), "end")


def ticks(low: float, high: float) -> list[float]:
    """Return about four round values; the first is at most `low`, the last at least `high`."""
    step = _round_step((high - low) or abs(high) or 1.0)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * place for place in range(first, max(last, first + 1) + 1)]


def decades(low: float, high: float) -> list[float]:
    """Return powers of ten around the range, and if there are few, also their multiples by 2 and 5."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    if last - first > 2:
        skip = -(-(last - first) // _TICKS)
        return [10.0**power for power in range(first, last + skip, skip)]
    every = [digit * 10.0**power for power in range(first, last + 1) for digit in (1, 2, 5)]
    start = max(place for place, mark in enumerate(every) if mark <= low * 1.0001)
    end = next((place for place, mark in enumerate(every) if mark >= high * 0.9999), len(every) - 1)
    return every[start : max(end, start + 1) + 1]


def _round_step(span: float) -> float:
    """Return 1, 2 or 5 times a power of ten, about a quarter of the range."""
    rough = span / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= rough * 0.999)


def label(value: float) -> str:
    """Format a tick in few characters."""
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-3:
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


# --- curves ---------------------------------------------------------------------------------------


def curves(
    name: str,
    series: Sequence[tuple[str, Curve]],
    *,
    logarithmic: bool = False,
    from_zero: bool = False,
    level: tuple[str, float, int] | None = None,
    starts: Sequence[int] = (),
    axis: str = "step",
    width: int = 470,
    height: int = 220,
) -> str:
    """Return the chart of a metric over the steps of a run.

    Args:
        axis: the name of the horizontal axis, for the hover texts.
        series: each with its name, "" if there is only one. Values that were not finite are red dots.
        level: the name and the value of a level to compare with, and the step after which it holds.
        starts: steps after which an attempt began, drawn as vertical lines.
    """
    values = [value for _, points in series for _, value in points if value is not None]
    if logarithmic:
        values = [value for value in values if value > 0]
    if not values:
        return picture(width, height, name, [text(58, 16, f"{name}: nothing was logged")])
    steps = [step for _, points in series for step, _ in points]
    shown = [*values, *([level[1]] if level else []), *([0.0] if from_zero else [])]
    marks = (decades if logarithmic else ticks)(min(shown), max(shown))
    first, last = min(steps), max(max(steps), min(steps) + 1)
    x = Axis(first, last, 58, width - 14)
    low, high = min(marks[0], min(shown)), max(marks[-1], max(shown))
    y = Axis(low, high, height - 24, 26, logarithmic)

    parts = [text(58, 15, name), *_horizontal_grid(x, y, marks)]
    every = max(1, round(_round_step(last - first)))
    for step in range(-(-first // every) * every, last + 1, every):
        anchor = "end" if x.at(step) > width - 40 else "middle"
        parts.append(text(min(x.at(step), width - 4.0), height - 6, f"{step:,}", anchor))
    parts += [
        line(x.at(step), y.end, x.at(step), y.start, "start")
        for step in starts
        if first < step <= last
    ]
    if level is not None:
        start = x.at(max(first, level[2]))
        parts.append(line(start, y.at(level[1]), x.end, y.at(level[1]), "level"))
    for place, (_, points) in enumerate(series):
        parts += _curve(points, x, y, place, axis)
    names = [(f"curve curve-{place}", called) for place, (called, _) in enumerate(series) if called]
    parts += _curve_names([*names, *([("level", level[0])] if level else [])], x.end)
    return picture(width, height, f"{name} by {axis}", parts)


def _curve(points: Curve, x: Axis, y: Axis, place: int, axis: str) -> Iterator[str]:
    for segment in _segments(points, positive=y.logarithmic):
        if len(segment) > 1:
            placed = ((x.at(step), y.at(known)) for step, known in segment)
            yield polyline(placed, f"curve curve-{place}")
        if len(segment) == 1 or len(points) <= 12:
            for step, known in segment:
                hint = f"{axis} {step}: {known:.5g}"
                yield dot(x.at(step), y.at(known), 2.5, f"point-{place}", hint)
    for step, value in points:
        if value is None:
            yield dot(x.at(step), y.end, 3.5, "bad", f"{axis} {step}: not finite")


def _segments(points: Curve, positive: bool) -> Iterator[list[tuple[int, float]]]:
    """Yield the segments between values that cannot be drawn."""

    def is_drawn(point: tuple[int, float | None]) -> bool:
        return point[1] is not None and (point[1] > 0 or not positive)

    for drawn, segment in groupby(points, is_drawn):
        if drawn:
            yield [(step, value) for step, value in segment if value is not None]


def _curve_names(entries: Sequence[tuple[str, str]], right: float) -> Iterator[str]:
    """Yield the names of curves, to the right of the chart's name and above the curves."""
    for kind, called in reversed(entries):
        yield text(right, 15, called, "end")
        right -= 6.8 * len(called) + 6
        yield line(right - 16, 11, right, 11, kind)
        right -= 28


# --- scatter --------------------------------------------------------------------------------------


def scatter(points: Sequence[Point], front: Sequence[Point]) -> str:
    """Return the chart of layouts by memory and speed, with the points of `front` joined and emphasized."""
    width, height = 960, 420
    marks_x = ticks(0.0, max(point[0] for point in [*points, *front]))
    marks_y = ticks(0.0, max(point[1] for point in [*points, *front]))
    x = Axis(0.0, marks_x[-1], 70, width - 20)
    y = Axis(0.0, marks_y[-1], height - 44, 20)
    parts = [*_horizontal_grid(x, y, marks_y)]
    for mark in marks_x:
        parts.append(line(x.at(mark), y.end, x.at(mark), y.start, "grid"))
        parts.append(text(x.at(mark), y.start + 16, label(mark), "middle"))
    parts.append(text((x.start + x.end) / 2, height - 8, "GiB on the fullest device", "middle"))
    parts.append(text(x.start, 11, "tokens/s per device"))
    parts.append(polyline(((x.at(a), y.at(b)) for a, b, _ in front), "front-line"))
    parts += [dot(x.at(a), y.at(b), 2.5, "dot", hint) for a, b, hint in points]
    parts += [dot(x.at(a), y.at(b), 5, "front", hint) for a, b, hint in front]
    return picture(width, height, "Layouts by memory and speed", parts)


# --- text -----------------------------------------------------------------------------------------


def legend(entries: Iterable[tuple[str, str, str]], width: int, indent: int = 0) -> Text:
    """Return lines of at most `width` columns with the meanings of signs.

    Args:
        entries: sign, style and meaning.
        indent: the blanks before each line.
    """
    from rich.text import Text

    lines, used = Text(" " * indent, no_wrap=True), 0
    for sign, style, meaning in entries:
        size = len(f"  {sign} {meaning}")
        gap = "  " if used else ""
        if indent + used + size > width + 2:
            gap, used = "\n" + " " * indent, 0
        lines.append(gap).append(sign, style).append(f" {meaning}")
        used += size
    return lines.append("\n")


def curve_line(
    name: str, points: Curve, width: int, scale: tuple[float, float] | None = None
) -> str:
    """Return one line: first value, the course in blocks, last value; `!` for values that were not finite.

    Args:
        scale: the lowest and the highest block; None: the curve's own lowest and highest value.
    """
    values = [value for _, value in points]
    known = [value for value in values if value is not None]
    first, last = ("not finite" if v is None else f"{v:.4g}" for v in (values[0], values[-1]))
    if not known:
        return f"{name:10} {first}"
    low, high = scale or (min(known), max(known))
    count = min(width, len(values))
    blocks = []
    for place in range(count):
        some = values[place * len(values) // count : (place + 1) * len(values) // count]
        here = [value for value in some if value is not None]
        if len(here) < len(some):
            blocks.append("!")
            continue
        share = (math.fsum(here) / len(here) - low) / ((high - low) or 1.0)
        blocks.append(_BLOCKS[min(len(_BLOCKS) - 1, int(share * len(_BLOCKS)))])
    return f"{name:10} {first:>10} {''.join(blocks)} {last}"
