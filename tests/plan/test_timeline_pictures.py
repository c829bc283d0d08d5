"""Timelines, parsed and compared with the simulation that they show."""

from __future__ import annotations

import html
import io
import re

import pytest
from rich.console import Console

from nanoscale.plan.pipeline.orders import order
from nanoscale.plan.pipeline.simulation import Timeline, simulate, transfers_overlap
from nanoscale.view.blocks import Chart, Report, page
from nanoscale.view.plan.pictures import _STYLE as STYLES
from nanoscale.view.plan.pictures import shown, timeline_text, windows
from tests.plan.schedules import SCHEDULES, even_costs

KINDS = {style.split()[-1]: kind for kind, style in STYLES.items()}


def timeline_plain(timeline: Timeline, width: int = 100) -> str:
    return "".join(
        f"{line.rstrip()}\n" for line in timeline_text(timeline, width).plain.splitlines()
    )


def timeline(schedule: str, pp: int, virtual: int, micro_batches: int) -> Timeline:
    overlap = transfers_overlap(schedule)
    costs = even_costs(pp * virtual, 0.0101, 0.0153, 0.0087, 0.0011, overlap)
    return simulate(order(schedule, pp, virtual, micro_batches), costs)


def doing(step: Timeline, rank: int, moment: float) -> str:
    """Return a rank's action at a moment, in the simulation."""
    kinds = [span.action.kind for span in step.ranks[rank] if span.start <= moment < span.end]
    return kinds[0] if kinds else " "


# --- text -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "virtual"), SCHEDULES)
@pytest.mark.parametrize("width", [80, 133, 200])
def test_text_has_a_line_for_every_rank_and_fits(schedule, virtual, width):
    for pp, micro_batches in ((2, 4), (4, 8), (8, 64), (16, 32)):
        lines = timeline_plain(timeline(schedule, pp, virtual, micro_batches), width).splitlines()
        assert max(map(len, lines)) <= width
        assert [int(line.split()[1]) for line in lines if line.startswith("rank ")] == [*range(pp)]


@pytest.mark.parametrize(("schedule", "virtual"), SCHEDULES)
def test_every_column_shows_what_the_rank_does_in_its_middle(schedule, virtual):
    step = timeline(schedule, 3, virtual, 6)
    lines = [line for line in timeline_text(step, 200).split() if line.plain.startswith("rank ")]
    for rank, line in enumerate(lines):
        start, end = line.plain.index("|") + 1, line.plain.rindex("|")
        styles = {at: str(span.style) for span in line.spans for at in range(span.start, span.end)}
        shown = [KINDS.get(styles[at].split()[-1], " ") for at in range(start, end)]
        column = step.makespan / len(shown)
        assert shown == [doing(step, rank, (c + 0.5) * column) for c in range(len(shown))]


def test_kinds_are_told_apart_without_color():
    """Wide cells end in a sign of their kind; narrow ones are its letter, small in a rank's later stages."""
    text = timeline_plain(timeline("dualpipev", 2, 2, 4), 200)
    cells = re.findall(r"([FBIWfbiw])[0-9]+([-=~+])+", text)
    assert {(letter.upper(), sign) for letter, sign in cells} == {
        ("F", "-"), ("B", "="), ("I", "~"), ("W", "+"),
    }  # fmt: skip
    assert {letter for letter, _ in cells} >= {"F", "f", "B", "b"}
    crowded = timeline_plain(timeline("gpipe", 2, 1, 128), 80)
    assert re.search("F{20}", crowded)


def test_text_names_the_micro_batches_in_their_order():
    first = timeline_plain(timeline("1f1b", 4, 1, 4), 200).splitlines()[1]
    assert re.findall("[FB][0-9]", first) == [
        "F0", "F1", "F2", "F3", "B0", "B1", "B2", "B3",
    ]  # fmt: skip


def test_text_says_the_utilization():
    step = simulate(order("1f1b", 4, 1, 4), even_costs(4))
    lines = timeline_plain(step).splitlines()
    assert "step 21 s, utilization 57.1%, idle 42.9%" in lines[0]
    assert all(line.endswith("57.1%") for line in lines[1:5])


def test_without_a_terminal_rich_prints_the_plain_text():
    step = timeline("zbv", 4, 2, 8)
    written = io.StringIO()
    Console(file=written, width=120, soft_wrap=True).print(timeline_text(step, 120), end="")
    plain = "".join(line.rstrip() + "\n" for line in written.getvalue().splitlines())
    assert plain == timeline_plain(step, 120)


def test_a_page_has_the_same_text_in_colors():
    step = timeline("zbv", 4, 2, 8)
    report = Report("title", [Chart(lambda _: timeline_text(step, 120))])
    (drawn,) = re.findall('<pre class="wide">(.*?)</pre>', page(report), re.DOTALL)
    assert len(re.findall('<span style="[^"]*background-color: #', drawn)) > 4 * 8
    plain = html.unescape(re.sub("<[^>]*>", "", drawn))
    assert "".join(f"{line.rstrip()}\n" for line in plain.splitlines()) == timeline_plain(step, 120)


# --- omitted parts --------------------------------------------------------------------------------


def test_a_long_step_shows_its_beginning_and_its_end():
    step = timeline("1f1b", 4, 1, 512)
    begin, end = windows(step, 60)
    assert (begin.start, end.end) == (0, step.makespan) and begin.end < end.start
    assert begin.seconds == pytest.approx(30 * 0.0101)
    assert " ⋯ " in timeline_plain(step)
    assert windows(timeline("1f1b", 4, 1, 4), 60)[0].end == timeline("1f1b", 4, 1, 4).makespan


def test_windows_are_long_enough_to_see_every_rank_begin_and_end():
    step = timeline("1f1b", 16, 1, 512)
    begin, end = windows(step, 10)
    assert all(spans[0].start < begin.end and spans[-1].end > end.start for spans in step.ranks)


def test_of_many_ranks_the_first_and_the_last_are_shown():
    step = timeline("1f1b", 64, 1, 64)
    assert shown(64, 32) == [*range(15), None, *range(49, 64)]
    assert "34 more" in timeline_plain(step)
    assert shown(64, 64) == [*range(64)]
