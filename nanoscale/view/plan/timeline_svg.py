"""A pipeline's timeline as SVG: a row per rank, a box per action, time to the right.

Its colors are in the style of the page. Boxes differ by brightness and hatching, and by a letter if it fits,
so the picture is readable in grey.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nanoscale.common.units import duration
from nanoscale.plan.pipeline import Kind, Span, Timeline
from nanoscale.view.charts import box, legend, line, number, picture, text
from nanoscale.view.plan.timeline import (
    MEANINGS,
    Window,
    first_stages,
    kinds,
    percent,
    rows,
    several_stages,
    windows,
    within,
)

MOST_RANKS = 48
"""The most rows; beyond it, ranks in the middle are left out."""
MOST_HINTS = 1500
"""The most boxes with a hover text."""
_ROW, _GAP = 22, 4
_LEFT, _RIGHT, _TOP = 62, 58, 28
_BREAK = 26
_PER_PASS = 7.0
"""The least pixels of a forward pass, unless ranks take long to begin."""
_DIGIT = 6.2
"""The width of a digit in a label."""
_CLASS: dict[Kind, str] = {"F": "f", "B": "b", "I": "i", "W": "w"}
_HATCHES = {"i": "M0 6L6 0", "w": "M0 0L6 6"}


def timeline_svg(timeline: Timeline, width: int = 960) -> str:
    """Return the picture as one `<svg>` element, `width` pixels wide at its natural size."""
    shown, panels = rows(timeline, MOST_RANKS), _panels(timeline, width)
    count = sum(
        sum(1 for _ in within(timeline.ranks[rank], panel.window))
        for rank in shown
        if rank is not None
        for panel in panels
    )
    parts = [_hatches(), *_head(timeline, width)]
    y = _TOP
    for rank in shown:
        if rank is None:
            hidden = len(timeline.ranks) - len(shown) + 1
            parts.append(text(width / 2, y + 15, f"… {hidden} more ranks", "middle"))
        else:
            parts += _rank(timeline, rank, panels, y, width, hints=count <= MOST_HINTS)
        y += _ROW + _GAP
    for panel in panels:
        parts += _axis(panel, y)
    if len(panels) > 1:
        parts.append(text(panels[1].left - _BREAK / 2, (_TOP + y) / 2, "⋯", "middle"))
    entries, height = legend(_meanings(timeline), _LEFT, y + 29, width)
    return picture(width, height, "Pipeline timeline", [*parts, *entries], "timeline")


@dataclass(frozen=True, slots=True)
class _Panel:
    """A window of time and its position, in pixels."""

    window: Window
    left: float
    width: float

    def x(self, seconds: float) -> float:
        return self.left + (seconds - self.window.start) / (self.window.seconds or 1) * self.width


def _panels(timeline: Timeline, width: int) -> list[_Panel]:
    space = width - _LEFT - _RIGHT
    shown = windows(timeline, (space - _BREAK) / _PER_PASS)
    if len(shown) == 1:
        return [_Panel(shown[0], _LEFT, space)]
    half = (space - _BREAK) / 2
    return [_Panel(shown[0], _LEFT, half), _Panel(shown[1], _LEFT + half + _BREAK, half)]


def _hatches() -> str:
    patterns = [
        f'<pattern id="hatch-{name}" width="6" height="6" patternUnits="userSpaceOnUse">'
        f'<path d="{path}" class="stroke-{name}"/></pattern>'
        for name, path in _HATCHES.items()
    ]
    return f"<defs>{''.join(patterns)}</defs>"


def _head(timeline: Timeline, width: int) -> Iterator[str]:
    idle = f"idle {percent(timeline.bubble_fraction)}"
    utilization = f"utilization {percent(timeline.utilization)}"
    yield text(_LEFT, 17, f"step {duration(timeline.makespan)} · {utilization} · {idle}")
    yield text(width - 4, 17, "busy", "end")


def _axis(panel: _Panel, y: int) -> Iterator[str]:
    yield line(panel.left, y, panel.left + panel.width, y, "axis")
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        x = panel.left + share * panel.width
        seconds = panel.window.start + share * panel.window.seconds
        yield line(x, y, x, y + 4, "axis")
        yield text(x, y + 16, duration(seconds), anchor)


def _meanings(timeline: Timeline) -> list[tuple[list[str], str]]:
    """Return the entries of the legend."""
    entries = []
    for kind in kinds(timeline):
        look = _CLASS[kind]
        hatch = [f'class="hatch-{look}"'] if look in _HATCHES else []
        entries.append(([f'class="{look}"', *hatch], f"{kind} {MEANINGS[kind]}"))
    if several_stages(timeline):
        late = f'class="{_CLASS[kinds(timeline)[0]]} late"'
        entries.append(([late], "lighter: a later stage of the rank"))
    return [*entries, (['class="idle"'], "idle")]


# --- a rank ---------------------------------------------------------------------------------------


def _rank(
    timeline: Timeline, rank: int, panels: list[_Panel], y: int, width: int, *, hints: bool
) -> Iterator[str]:
    busy = timeline.busy[rank] / timeline.makespan if timeline.makespan else 1.0
    yield text(_LEFT - 8, y + 15, f"rank {rank}", "end")
    yield text(width - 4, y + 15, percent(busy), "end")
    first = first_stages(timeline)[rank]
    for panel in panels:
        yield box(panel.left, y, panel.width, _ROW, 'class="idle"')
        spans = list(within(timeline.ranks[rank], panel.window))
        yield from (_boxes if hints else _merged_boxes)(spans, panel, y, first)
        yield from (_label(span, panel, y) for span in spans)


def _boxes(spans: list[Span], panel: _Panel, y: int, first: int) -> Iterator[str]:
    """Yield a box for every action, with a hover text."""
    for span in spans:
        x, width = _extent(span, panel)
        yield box(x, y, width, _ROW, f'class="{_look(span, first)}"', _hint(span))
        if _CLASS[span.action.kind] in _HATCHES:
            yield box(x, y, width, _ROW, f'class="hatch-{_CLASS[span.action.kind]}"')


def _merged_boxes(spans: list[Span], panel: _Panel, y: int, first: int) -> Iterator[str]:
    """Yield all boxes of a kind in one path: a tenth of the bytes."""
    paths: dict[str, list[str]] = {}
    for span in spans:
        x, width = _extent(span, panel)
        path = f"M{number(x)} {y}h{number(width)}v{_ROW}h{number(-width)}z"
        paths.setdefault(_look(span, first), []).append(path)
        if _CLASS[span.action.kind] in _HATCHES:
            paths.setdefault(f"hatch-{_CLASS[span.action.kind]}", []).append(path)
    for look, drawn in paths.items():
        yield f'<path class="{look}" d="{"".join(drawn)}"/>'


def _label(span: Span, panel: _Panel, y: int) -> str:
    """Return letter and micro batch, the micro batch alone, or nothing, depending on the box's width."""
    x, width = _extent(span, panel)
    kind, _, batch, _ = span.action
    for name in (f"{kind}{batch}", str(batch)):
        if len(name) * _DIGIT + 1.5 <= width:
            return text(x + width / 2, y + 15, name, kind="in on-b" if kind == "B" else "in")
    return ""


def _extent(span: Span, panel: _Panel) -> tuple[float, float]:
    """Return left edge and width, with a small gap to the next box if it is wide enough."""
    x = panel.x(span.start)
    width = panel.x(span.end) - x
    return x, width - 1 if width > 4 else width


def _look(span: Span, first: int) -> str:
    return _CLASS[span.action.kind] + ("" if span.action.stage == first else " late")


def _hint(span: Span) -> str:
    kind, stage, batch, _ = span.action
    return (
        f"{MEANINGS[kind]}, micro batch {batch}, stage {stage}: "
        f"{duration(span.start)} to {duration(span.end)}"
    )
