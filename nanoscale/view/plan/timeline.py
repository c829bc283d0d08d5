"""The visible part of a pipeline's timeline, for the terminal and for SVG."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nanoscale.plan.pipeline import Kind, Span, Timeline

MEANINGS: dict[Kind, str] = {
    "F": "forward",
    "B": "backward",
    "I": "gradients of inputs",
    "W": "gradients of weights",
}


@dataclass(frozen=True, slots=True)
class Window:
    """A span of the step, in seconds."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


def windows(timeline: Timeline, room: float) -> list[Window]:
    """Return the whole step if `room` of its forward passes fit side by side, else its beginning and its end.

    Both windows are equally long, and long enough to show every rank begin and end.
    """
    passes = sorted(
        span.end - span.start
        for spans in timeline.ranks
        for span in spans
        if span.action.kind == "F" and span.end > span.start
    )
    fill = max(spans[0].start for spans in timeline.ranks)
    drain = timeline.makespan - min(spans[-1].end for spans in timeline.ranks)
    usual = passes[len(passes) // 2] if passes else 0.0
    half = max(usual * room / 2, 1.5 * fill, 1.5 * drain)
    if not passes or timeline.makespan <= 2 * half:
        return [Window(0.0, timeline.makespan)]
    return [Window(0.0, half), Window(timeline.makespan - half, timeline.makespan)]


def rows(timeline: Timeline, most: int) -> list[int | None]:
    """Return the ranks to show: all, or the first and the last of too many, with None between for the
    others."""
    count = len(timeline.ranks)
    if count <= most:
        return list(range(count))
    half = max(1, (most - 1) // 2)
    return [*range(half), None, *range(count - half, count)]


def within(spans: list[Span], window: Window) -> Iterator[Span]:
    """Yield the spans within a window, cut to it, without those of no duration."""
    for span in spans:
        if span.end > window.start and span.start < window.end and span.end > span.start:
            yield Span(span.action, max(span.start, window.start), min(span.end, window.end))


def kinds(timeline: Timeline) -> list[Kind]:
    """Return the kinds of actions in the timeline, in the order of the legend."""
    seen = {span.action.kind for spans in timeline.ranks for span in spans}
    return [kind for kind in MEANINGS if kind in seen]


def first_stages(timeline: Timeline) -> list[int]:
    """Return the first stage of each rank: the others are drawn in another shade."""
    return [min(span.action.stage for span in spans) for spans in timeline.ranks]


def several_stages(timeline: Timeline) -> bool:
    """True if ranks have more than one stage."""
    return len({span.action.stage for span in timeline.ranks[0]}) > 1


def percent(share: float) -> str:
    """Format a share as percent with one decimal."""
    return f"{100 * share:.1f} %"
