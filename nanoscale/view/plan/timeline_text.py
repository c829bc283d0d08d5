"""A pipeline's timeline for the terminal: a line per rank, a letter for its action, time to the right.

Letters carry everything that colors do, so the plain text is the same picture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

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

if TYPE_CHECKING:
    from rich.text import Text

MOST_RANKS = 32
"""The most lines of ranks; beyond it, those in the middle are left out."""
_FILL: dict[Kind, str] = {"F": "-", "B": "=", "I": "~", "W": "+"}
_STYLE: dict[Kind, str] = {
    "F": "black on bright_blue",
    "B": "black on green",
    "I": "black on cyan",
    "W": "black on yellow",
}
_IDLE = "·"
_BREAK = " ⋯ "


class StyledText(NamedTuple):
    """A text in one of rich's styles; plain if the style is empty."""

    text: str
    style: str = ""


Line = list[StyledText]


def timeline_rich(timeline: Timeline, width: int = 100) -> Text:
    """Return the timeline with colors; rich omits them if the output is not a terminal."""
    from rich.text import Text

    text = Text(no_wrap=True)
    for line in timeline_lines(timeline, width):
        for piece in line:
            text.append(piece.text, style=piece.style or None)
        text.append("\n")
    return text


def timeline_lines(timeline: Timeline, width: int = 100) -> list[Line]:
    """Return a head with the utilization, a line per rank with its own, a time scale and a legend."""
    label = len(f"rank {len(timeline.ranks) - 1} ")
    columns = max(60, width) - label - len("|| 100.0 %")
    shown = windows(timeline, columns - len(_BREAK))
    if len(shown) > 1:
        columns -= len(_BREAK)
    each = columns // len(shown)
    first = first_stages(timeline)
    lines: list[Line] = [_head(timeline)]
    for rank in rows(timeline, MOST_RANKS):
        if rank is None:
            lines.append(
                [
                    StyledText(
                        f"{'⋮':<{label}} {len(timeline.ranks) - 2 * (MOST_RANKS // 2 - 1)} more"
                    )
                ]
            )
            continue
        line = [StyledText(f"{f'rank {rank}':<{label}}|")]
        for place, window in enumerate(shown):
            line += [StyledText(_BREAK)] if place else []
            line += _cells(timeline.ranks[rank], window, each, first[rank])
        busy = timeline.busy[rank] / timeline.makespan if timeline.makespan else 1.0
        lines.append([*line, StyledText(f"|{percent(busy):>8}")])
    return [*lines, _scale(shown, each, label), *_legend(timeline, max(60, width))]


def _head(timeline: Timeline) -> Line:
    return [
        StyledText(
            f"step {duration(timeline.makespan)}, utilization {percent(timeline.utilization)}, "
            f"idle {percent(timeline.bubble_fraction)}"
        )
    ]


def _cells(spans: list[Span], window: Window, columns: int, first: int) -> Line:
    """Return a rank's line in a window: every action from the column nearest its start to that nearest its
    end."""
    line: Line = []
    at = 0
    step = window.seconds / columns
    for span in within(spans, window):
        start = max(at, round((span.start - window.start) / step))
        end = round((span.end - window.start) / step)
        if end <= start:
            continue
        if start > at:
            line.append(StyledText(_IDLE * (start - at), "dim"))
        line.append(StyledText(_cell(span, end - start, first), _STYLE[span.action.kind]))
        at = end
    return [*line, StyledText(_IDLE * (columns - at), "dim")] if at < columns else line


def _cell(span: Span, width: int, first: int) -> str:
    """Return letter and micro batch, or the letter alone if there is no room, filled with the kind's
    character."""
    kind, stage, batch, _ = span.action
    letter = kind if stage == first else kind.lower()
    name = f"{letter}{batch}"
    return f"{name if len(name) <= width else letter:{_FILL[kind]}<{width}}"


def _scale(shown: list[Window], each: int, label: int) -> Line:
    """Return the times at the ends of the windows, below them."""
    parts = []
    for window in shown:
        begin, end = duration(window.start), duration(window.end)
        parts.append(f"{begin}{end:>{each - len(begin)}}")
    return [StyledText(" " * (label + 1) + (" " * len(_BREAK)).join(parts), "dim")]


def _legend(timeline: Timeline, width: int) -> list[Line]:
    entries = [
        [StyledText(f"{kind}0{_FILL[kind]}", _STYLE[kind]), StyledText(f" {MEANINGS[kind]}")]
        for kind in kinds(timeline)
    ]
    entries.append([StyledText(_IDLE * 3, "dim"), StyledText(" idle")])
    if several_stages(timeline):
        entries.append([StyledText("f, b", "bold"), StyledText(" in later stages of the rank")])
    lines: list[Line] = [[]]
    used = 0
    for entry in entries:
        size = sum(len(piece.text) for piece in entry)
        if used and used + 3 + size > width:
            lines.append([])
            used = 0
        if used:
            lines[-1].append(StyledText("   "))
        lines[-1] += entry
        used += size + (3 if used else 0)
    return lines
