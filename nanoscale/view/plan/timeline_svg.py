"""A pipeline's timeline as SVG: a row per rank, a box per action, time to the right.

The picture carries its own style and needs no other file. Inside a page with its own light or dark style, set
`--timeline-ink` and `--timeline-idle` on an element around it; otherwise it follows the reader's system. Boxes
differ by brightness and hatching, and by a letter if it fits, so the picture is readable in grey.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from nanoscale.common.units import duration
from nanoscale.plan.pipeline import Kind, Span, Timeline
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


def timeline_svg(
    timeline: Timeline,
    width: int = 960,
    title: str = "Pipeline timeline",
    name: str = "timeline",
) -> str:
    """Return the picture as one `<svg>` element, `width` pixels wide at its natural size.

    `name` is its id, which limits its style to this picture: each picture of a page needs another one.
    """
    return _Drawing(timeline, width, title, name).text()


@dataclass(frozen=True, slots=True)
class _Panel:
    """A window of time and its position, in pixels."""

    window: Window
    left: float
    width: float

    def x(self, seconds: float) -> float:
        return self.left + (seconds - self.window.start) / (self.window.seconds or 1) * self.width


class _Drawing:
    def __init__(self, timeline: Timeline, width: int, title: str, name: str) -> None:
        self._timeline, self._width, self._title, self._id = timeline, width, title, name
        self._rows = rows(timeline, MOST_RANKS)
        self._first = first_stages(timeline)
        self._panels = self._place_panels()
        shown = sum(
            sum(1 for _ in within(timeline.ranks[rank], panel.window))
            for rank in self._rows
            if rank is not None
            for panel in self._panels
        )
        self._hints = shown <= MOST_HINTS

    def text(self) -> str:
        bottom = _TOP + len(self._rows) * (_ROW + _GAP)
        legend, height = self._legend(bottom + 40)
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="timeline" id="{self._id}" role="img" '
            f'viewBox="0 0 {self._width} {height}" width="{self._width}" height="{height}">'
            f"<title>{escape(self._title)}</title>"
        )
        ranks = [self._rank(rank, _TOP + i * (_ROW + _GAP)) for i, rank in enumerate(self._rows)]
        return "\n".join(
            [head, self._style(), self._head(), *ranks, self._axis(bottom), legend, "</svg>"]
        )

    def _place_panels(self) -> list[_Panel]:
        room = self._width - _LEFT - _RIGHT
        shown = windows(self._timeline, (room - _BREAK) / _PER_PASS)
        if len(shown) == 1:
            return [_Panel(shown[0], _LEFT, room)]
        half = (room - _BREAK) / 2
        return [_Panel(shown[0], _LEFT, half), _Panel(shown[1], _LEFT + half + _BREAK, half)]

    def _style(self) -> str:
        """Return the rules for this picture alone, since a page may hold several."""
        me = f"#{self._id}"
        hatches = self._hatch("i", "#0b5f66", "M0 6L6 0") + self._hatch("w", "#8a5a00", "M0 0L6 6")
        return f"""<defs>{hatches}</defs>
<style>
{me} {{ font: 11px ui-sans-serif, system-ui, sans-serif; font-variant-numeric: tabular-nums; }}
{me} text {{ fill: var(--timeline-ink, #24292f); }}
{me} .idle {{ fill: var(--timeline-idle, #eceff2); }}
{me} .axis {{ stroke: var(--timeline-ink, #24292f); opacity: .45; }}
@media (prefers-color-scheme: dark) {{
{me} text {{ fill: var(--timeline-ink, #d5dbe1); }}
{me} .idle {{ fill: var(--timeline-idle, #2a3036); }}
{me} .axis {{ stroke: var(--timeline-ink, #d5dbe1); }}
}}
{me} text.in {{ fill: #10202c; text-anchor: middle; pointer-events: none; }}
{me} text.on-b {{ fill: #fff; }}
{me} .f {{ fill: #9dc3ee; }} {me} .f.late {{ fill: #cfe1f7; }}
{me} .b {{ fill: #2c7a4b; }} {me} .b.late {{ fill: #4f9b6c; }}
{me} .i {{ fill: #45aab0; }} {me} .i.late {{ fill: #86cdd0; }}
{me} .w {{ fill: #f0b849; }} {me} .w.late {{ fill: #f8dc9f; }}
{me} .hatch-i {{ fill: url(#{self._id}-i); }}
{me} .hatch-w {{ fill: url(#{self._id}-w); }}
{me} .end {{ text-anchor: end; }}
{me} .middle {{ text-anchor: middle; }}
</style>"""

    def _hatch(self, name: str, colour: str, path: str) -> str:
        return (
            f'<pattern id="{self._id}-{name}" width="6" height="6" patternUnits="userSpaceOnUse">'
            f'<path d="{path}" stroke="{colour}" stroke-width="1" opacity=".45"/></pattern>'
        )

    def _head(self) -> str:
        timeline = self._timeline
        return (
            f'<text x="{_LEFT}" y="17">step {duration(timeline.makespan)} · utilisation '
            f"{percent(timeline.utilisation)} · idle {percent(timeline.bubble_fraction)}</text>"
            f'<text class="end" x="{self._width - 4}" y="17">busy</text>'
        )

    # --- rows -------------------------------------------------------------------------------------

    def _rank(self, rank: int | None, y: int) -> str:
        if rank is None:
            hidden = len(self._timeline.ranks) - len(self._rows) + 1
            return f'<text class="middle" x="{self._width / 2}" y="{y + 15}">… {hidden} more ranks</text>'
        timeline = self._timeline
        busy = timeline.busy[rank] / timeline.makespan if timeline.makespan else 1.0
        parts = [
            f'<text class="end" x="{_LEFT - 8}" y="{y + 15}">rank {rank}</text>',
            f'<text class="end" x="{self._width - 4}" y="{y + 15}">{percent(busy)}</text>',
        ]
        for panel in self._panels:
            parts.append(
                f'<rect class="idle" x="{_n(panel.left)}" y="{y}" width="{_n(panel.width)}" height="{_ROW}"/>'
            )
            spans = list(within(timeline.ranks[rank], panel.window))
            boxes = self._boxes if self._hints else self._merged_boxes
            parts += boxes(spans, panel, y, self._first[rank])
            parts += [self._label(span, panel, y) for span in spans]
        return "".join(parts)

    def _boxes(self, spans: list[Span], panel: _Panel, y: int, first: int) -> list[str]:
        """Return a box for every action, with a hover text."""
        parts = []
        for span in spans:
            kind = span.action.kind
            place = _place(span, panel, y)
            box = f'class="{_look(span, first)}" {place}'
            parts.append(f"<rect {box}><title>{escape(_hint(span))}</title></rect>")
            if kind in "IW":
                parts.append(f'<rect class="hatch-{_CLASS[kind]}" {place} pointer-events="none"/>')
        return parts

    def _merged_boxes(self, spans: list[Span], panel: _Panel, y: int, first: int) -> list[str]:
        """Return all boxes of a kind in one path: a tenth of the bytes."""
        paths: dict[str, list[str]] = {}
        for span in spans:
            x, width = _extent(span, panel)
            path = f"M{_n(x)} {y}h{_n(width)}v{_ROW}h{_n(-width)}z"
            paths.setdefault(_look(span, first), []).append(path)
            if span.action.kind in "IW":
                paths.setdefault(f"hatch-{_CLASS[span.action.kind]}", []).append(path)
        return [f'<path class="{look}" d="{"".join(path)}"/>' for look, path in paths.items()]

    def _label(self, span: Span, panel: _Panel, y: int) -> str:
        """Return letter and micro batch, the micro batch alone, or nothing, depending on the box's width."""
        x, width = _extent(span, panel)
        kind, _, batch, _ = span.action
        name = next(
            (text for text in (f"{kind}{batch}", str(batch)) if len(text) * _DIGIT + 1.5 <= width),
            "",
        )
        if not name:
            return ""
        look = "in on-b" if kind == "B" else "in"
        return f'<text class="{look}" x="{_n(x + width / 2)}" y="{y + 15}">{name}</text>'

    # --- below ------------------------------------------------------------------------------------

    def _axis(self, bottom: int) -> str:
        parts = []
        for panel in self._panels:
            right = panel.left + panel.width
            parts.append(
                f'<path class="axis" fill="none" d="M{_n(panel.left)} {bottom}h{_n(panel.width)}"/>'
            )
            for share, anchor in ((0.0, ""), (0.5, "middle"), (1.0, "end")):
                x = panel.left + share * panel.width
                seconds = panel.window.start + share * panel.window.seconds
                parts.append(
                    f'<path class="axis" d="M{_n(x)} {bottom}v4"/>'
                    f'<text class="{anchor}" x="{_n(x)}" y="{bottom + 16}">{duration(seconds)}</text>'
                )
            if panel is not self._panels[-1]:
                middle = _TOP + len(self._rows) * (_ROW + _GAP) / 2
                parts.append(
                    f'<text class="middle" x="{_n(right + _BREAK / 2)}" y="{_n(middle)}">⋯</text>'
                )
        return "".join(parts)

    def _legend(self, y: int) -> tuple[str, int]:
        """Return the legend, and the lower end of the picture."""
        entries = [(_CLASS[kind], f"{kind} {MEANINGS[kind]}") for kind in kinds(self._timeline)]
        if several_stages(self._timeline):
            look = entries[0][0]
            entries.append((f"{look} late", "lighter: a later stage of the rank"))
        entries.append(("idle", "idle"))
        parts, x = [], float(_LEFT)
        for look, meaning in entries:
            size = 22 + len(meaning) * 5.8 + 16
            if x > _LEFT and x + size > self._width:
                x, y = float(_LEFT), y + 20
            box = f'x="{_n(x)}" y="{y - 11}" width="16" height="14"'
            parts.append(f'<rect class="{look}" {box}/>')
            if look in "iw":
                parts.append(f'<rect class="hatch-{look}" {box}/>')
            parts.append(f'<text x="{_n(x + 22)}" y="{y}">{meaning}</text>')
            x += size
        return "".join(parts), y + 14


def _extent(span: Span, panel: _Panel) -> tuple[float, float]:
    """Return left edge and width, with a small gap to the next box if it is wide enough."""
    x = panel.x(span.start)
    width = panel.x(span.end) - x
    return x, width - 1 if width > 4 else width


def _place(span: Span, panel: _Panel, y: int) -> str:
    x, width = _extent(span, panel)
    return f'x="{_n(x)}" y="{y}" width="{_n(width)}" height="{_ROW}"'


def _look(span: Span, first: int) -> str:
    return _CLASS[span.action.kind] + ("" if span.action.stage == first else " late")


def _hint(span: Span) -> str:
    kind, stage, batch, _ = span.action
    return (
        f"{MEANINGS[kind]}, micro batch {batch}, stage {stage}: "
        f"{duration(span.start)} to {duration(span.end)}"
    )


def _n(value: float) -> str:
    """Format a coordinate to a hundredth of a pixel, without trailing zeros."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
