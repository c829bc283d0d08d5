"""Pictures of a plan for the terminal, in which letters carry everything that colors do.

Memory has a bar per pipeline rank, with a letter for each part, compared with the device's capacity. A
pipeline's timeline has a line per rank, a letter for its action, and time to the right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanoscale.common.units import byte_size, duration
from nanoscale.plan.memory.peak import RankMemory
from nanoscale.plan.pipeline.orders import Kind
from nanoscale.plan.pipeline.simulation import Span, Timeline
from nanoscale.view.charts import legend

if TYPE_CHECKING:
    from rich.text import Text


MOST_BARS = 16
"""The most bars; others in the middle are left out, but never the worst rank's bar."""
LOOKS = {
    "weights": ("w", "#000000 on #6ea8fe"),
    "compute copies": ("c", "#000000 on #4fc3d9"),
    "gradients": ("g", "#000000 on #5fbf6f"),
    "optimizer": ("o", "#000000 on #d9b44a"),
    "units in flight": ("u", "#000000 on #9be7f2"),
    "activations": ("a", "#000000 on #d98ad9"),
    "logits and loss": ("l", "#000000 on #f2a6c8"),
    "communication buffers": ("b", "#000000 on #f2dd6e"),
    "fragmentation": ("f", "#000000 on #a3a9b0"),
    "context": ("x", "#000000 on #d5dbe1"),
}
"""The letter and style of each part."""


def bars(memory: Sequence[RankMemory], capacity: int, width: int) -> Text:
    """Return lines of `width` columns; bars beyond the capacity continue behind its mark, `|`."""
    from rich.text import Text

    worst = max(memory, key=lambda rank: rank.total)
    label = len(f"rank {len(memory) - 1} ")
    tail = max(len(f" {byte_size(rank.total)}") for rank in memory)
    columns = max(20, width - label - tail - 1)
    scale = columns / max(capacity, worst.total)
    text = Text(no_wrap=True)
    for number in shown(len(memory), MOST_BARS, worst.rank):
        if number is None:
            text.append("…\n")
            continue
        rank = memory[number]
        text.append(f"{f'rank {number}':<{label}}", "bold" if rank is worst else "")
        _bar(text, rank, round(capacity * scale), columns, scale)
        text.append(f" {byte_size(rank.total)}\n", "bold" if rank is worst else "")
    used = [name for name in LOOKS if any(rank.part(name).bytes for rank in memory)]
    entries = [(*LOOKS[name], name) for name in used]
    device = ("|", "bold", f"{byte_size(capacity)} of the device")
    return text.append_text(legend([*entries, device], width, label))


def shown(count: int, most: int, always: int = 0) -> list[int | None]:
    """Return the ranks to show: all, or of too many the first, the last and `always`; None stands for ranks
    that are left out."""
    if count <= most:
        return list(range(count))
    half = most // 2 - 1
    chosen = sorted({*range(half), always, *range(count - half, count)})
    found: list[int | None] = []
    for number in chosen:
        if found and found[-1] is not None and number > found[-1] + 1:
            found.append(None)
        found.append(number)
    return found


def _bar(text: Text, rank: RankMemory, limit: int, columns: int, scale: float) -> None:
    cells: list[tuple[str, str]] = []
    reached = 0.0
    for part in rank.parts:
        reached += part.bytes * scale
        cells += [LOOKS[part.name]] * (round(reached) - len(cells))
    cells += [(" ", "")] * (columns - len(cells))
    for position, (letter, style) in enumerate(cells[:columns]):
        if position == limit:
            text.append("|", "bold red")
        text.append(letter, style or None)
    if limit >= columns:
        text.append("|", "bold red")


MEANINGS: dict[Kind, str] = {
    "F": "forward",
    "B": "backward",
    "I": "gradients of inputs",
    "W": "gradients of weights",
}
MOST_RANKS = 32
"""The most lines of ranks; beyond it, lines in the middle are left out."""
_FILL: dict[Kind, str] = {"F": "-", "B": "=", "I": "~", "W": "+"}
_STYLE: dict[Kind, str] = {
    "F": "#000000 on #6ea8fe",
    "B": "#000000 on #5fbf6f",
    "I": "#000000 on #4fc3d9",
    "W": "#000000 on #d9b44a",
}
_IDLE = "·"
_BREAK = " ⋯ "


def timeline_text(timeline: Timeline, width: int = 100) -> Text:
    """Return a head with the utilization, a line per rank with its own, a time scale and a legend."""
    from rich.text import Text

    label = len(f"rank {len(timeline.ranks) - 1} ")
    columns = max(60, width) - label - len("||  100.0%")
    visible = windows(timeline, columns - len(_BREAK))
    if len(visible) > 1:
        columns -= len(_BREAK)
    each = columns // len(visible)
    # The first stage of each rank: the others are drawn in another shade.
    first = [min(span.action.stage for span in spans) for spans in timeline.ranks]
    text = Text(
        f"step {duration(timeline.makespan)}, utilization {timeline.utilization:.1%}, "
        f"idle {timeline.bubble_fraction:.1%}\n",
        no_wrap=True,
    )
    for rank in shown(len(timeline.ranks), MOST_RANKS):
        if rank is None:
            hidden = len(timeline.ranks) - 2 * (MOST_RANKS // 2 - 1)
            text.append(f"{'⋮':<{label}} {hidden} more\n")
            continue
        text.append(f"{f'rank {rank}':<{label}}|")
        for place, window in enumerate(visible):
            text.append(_BREAK if place else "")
            _append_cells(text, timeline.ranks[rank], window, each, first[rank])
        busy = timeline.busy[rank] / timeline.makespan if timeline.makespan else 1.0
        text.append(f"|{busy:>8.1%}\n")
    times = [(duration(window.start), duration(window.end)) for window in visible]
    scale = (" " * len(_BREAK)).join(f"{start}{end:>{each - len(start)}}" for start, end in times)
    text.append(f"{'':{label + 1}}{scale}\n", "dim")
    return text.append_text(_legend(timeline, max(60, width)))


def _append_cells(text: Text, spans: list[Span], window: Window, columns: int, first: int) -> None:
    """Append a rank's line in a window: every action from the column nearest its start to that nearest its
    end."""
    at = 0
    step = window.seconds / columns
    for span in within(spans, window):
        start = max(at, round((span.start - window.start) / step))
        end = round((span.end - window.start) / step)
        if end <= start:
            continue
        text.append(_IDLE * (start - at), "dim")
        text.append(_cell(span, end - start, first), _STYLE[span.action.kind])
        at = end
    text.append(_IDLE * (columns - at), "dim")


def _cell(span: Span, width: int, first: int) -> str:
    """Return letter and micro batch, or the letter alone if there is no room, filled with the kind's
    character."""
    kind, stage, batch, _ = span.action
    letter = kind if stage == first else kind.lower()
    name = f"{letter}{batch}"
    return f"{name if len(name) <= width else letter:{_FILL[kind]}<{width}}"


def _legend(timeline: Timeline, width: int) -> Text:
    kinds = {span.action.kind for spans in timeline.ranks for span in spans}
    entries = [
        (f"{kind}0{_FILL[kind]}", _STYLE[kind], text)
        for kind, text in MEANINGS.items()
        if kind in kinds
    ]
    entries.append((_IDLE * 3, "dim", "idle"))
    if len({span.action.stage for span in timeline.ranks[0]}) > 1:
        entries.append(("f, b", "bold", "in later stages of the rank"))
    return legend(entries, width)


# --- the visible part of the step -----------------------------------------------------------------


@dataclass(frozen=True)
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


def within(spans: list[Span], window: Window) -> Iterator[Span]:
    """Yield the spans within a window, cut to it, without empty ones."""
    for span in spans:
        if span.end > window.start and span.start < window.end and span.end > span.start:
            yield Span(span.action, max(span.start, window.start), min(span.end, window.end))
