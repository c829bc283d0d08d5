"""A metric of a run over its steps, as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from nanoscale.view.run.run_report import Curve
from nanoscale.view.svg import TICKS, dot, line, picture, round_step, text, ticks

_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 26, 24


def curve_svg(
    name: str,
    curves: Sequence[tuple[str, Curve]],
    *,
    logarithmic: bool = False,
    from_zero: bool = False,
    level: tuple[str, float] | None = None,
    starts: Sequence[int] = (),
    width: int = 470,
    height: int = 220,
) -> str:
    """Return one `<svg>` element.

    Args:
        curves: each with its name, "" if there is only one. Values that were not finite are red dots.
        level: the name and the value of a level to compare with.
        starts: steps after which an attempt began, drawn as vertical lines.
    """
    values = [value for _, points in curves for _, value in points if value is not None]
    if logarithmic:
        values = [value for value in values if value > 0]
    steps = [step for _, points in curves for step, _ in points]
    if not values:
        return picture(width, height, name, [text(_LEFT, 16, f"{name}: nothing was logged")])
    shown = [*values, *([level[1]] if level else []), *([0.0] if from_zero else [])]
    marks = _decades(min(shown), max(shown)) if logarithmic else ticks(min(shown), max(shown))
    low, high = min(marks[0], min(shown)), max(marks[-1], max(shown))
    first, last = min(steps), max(max(steps), min(steps) + 1)

    def x(step: float) -> float:
        return _LEFT + (step - first) / (last - first) * (width - _LEFT - _RIGHT)

    def y(value: float) -> float:
        share = (_scaled(value, logarithmic) - _scaled(low, logarithmic)) / (
            (_scaled(high, logarithmic) - _scaled(low, logarithmic)) or 1.0
        )
        return height - _BOTTOM - share * (height - _TOP - _BOTTOM)

    parts = [text(_LEFT, 15, name)]
    for mark in marks:
        parts += [line(_LEFT, y(mark), width - _RIGHT, y(mark), "grid")]
        parts += [text(_LEFT - 6, y(mark) + 4, label(mark), "end")]
    for step in whole_ticks(first, last):
        at = "end" if x(step) > width - 40 else "middle"
        parts.append(text(min(x(step), width - 4.0), height - 6, f"{step:,}", at))
    parts += [
        line(x(step), _TOP, x(step), height - _BOTTOM, "start")
        for step in starts
        if first < step <= last
    ]
    if level is not None:
        parts.append(line(_LEFT, y(level[1]), width - _RIGHT, y(level[1]), "level"))
    for place, (_, points) in enumerate(curves):
        for run in _finite(points, logarithmic):
            joined = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in run)
            if len(run) > 1:
                parts.append(f'<polyline points="{joined}" class="curve curve-{place}"/>')
            if len(run) == 1 or len(points) <= 12:
                parts += [
                    dot(x(step), y(value), 2.5, f"point-{place}", f"step {step}: {value:.5g}")
                    for step, value in run
                ]
        parts += [
            dot(x(step), _TOP, 3.5, "bad", f"step {step}: not finite")
            for step, value in points
            if value is None
        ]
    names = [(f"curve curve-{place}", called) for place, (called, _) in enumerate(curves) if called]
    return picture(width, height, f"{name} over steps", [*parts, *_legend(names, level, width)])


def _legend(
    names: list[tuple[str, str]], level: tuple[str, float] | None, width: int
) -> Iterator[str]:
    """Yield the legend, to the right of the name and above the curves."""
    entries = [*names, *([("level", level[0])] if level else [])]
    right = float(width - _RIGHT)
    for kind, called in reversed(entries):
        yield text(right, 15, called, "end")
        right -= 6.2 * len(called) + 6
        yield line(right - 16, 11, right, 11, kind)
        right -= 28


def _finite(points: Curve, positive: bool) -> Iterator[list[tuple[int, float]]]:
    """Yield the segments between values that cannot be drawn."""
    run: list[tuple[int, float]] = []
    for step, value in points:
        if value is None or (positive and value <= 0):
            if run:
                yield run
            run = []
        else:
            run.append((step, value))
    if run:
        yield run


def _scaled(value: float, logarithmic: bool) -> float:
    return math.log10(value) if logarithmic else value


def whole_ticks(first: int, last: int) -> list[int]:
    """Return round steps in the range."""
    step = max(1, round(round_step(last - first)))
    return list(range(-(-first // step) * step, last + 1, step))


def _decades(low: float, high: float) -> list[float]:
    """Return powers of ten around the range, and if there are few, also their multiples by 2 and 5."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    if last - first > 2:
        skip = -(-(last - first) // TICKS)
        return [10.0**power for power in range(first, last + skip, skip)]
    every = [digit * 10.0**power for power in range(first, last + 1) for digit in (1, 2, 5)]
    start = max(place for place, mark in enumerate(every) if mark <= low * 1.0001)
    end = next((place for place, mark in enumerate(every) if mark >= high * 0.9999), len(every) - 1)
    return every[start : max(end, start + 1) + 1]


def label(value: float) -> str:
    """Format a tick in few characters."""
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-3:
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
