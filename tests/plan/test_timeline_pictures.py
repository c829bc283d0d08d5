"""Timelines as text and as SVG, parsed and compared with the simulation that they show."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from rich.console import Console

from nanoscale.plan.pipeline import Costs, Timeline, order, simulate, transfers_overlap
from nanoscale.view import page
from nanoscale.view.plan.timeline import rows, windows
from nanoscale.view.plan.timeline_svg import timeline_svg
from nanoscale.view.plan.timeline_text import timeline_lines, timeline_rich
from tests.plan.schedules import SCHEDULES

SVG = "{http://www.w3.org/2000/svg}"
KINDS = {"bright_blue": "F", "green": "B", "cyan": "I", "yellow": "W"}


def timeline_plain(timeline: Timeline, width: int = 100) -> str:
    lines = ("".join(piece.text for piece in line) for line in timeline_lines(timeline, width))
    return "".join(f"{line.rstrip()}\n" for line in lines)


def timeline(schedule: str, pp: int, virtual: int, micro_batches: int) -> Timeline:
    overlap = transfers_overlap(schedule)
    costs = Costs.even(pp * virtual, 0.0101, 0.0153, 0.0087, 0.0011, overlap)
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
    lines = [line for line in timeline_lines(step, 200) if line[0].text.startswith("rank ")]
    for rank, line in enumerate(lines):
        styles = [piece.style.split()[-1] for piece in line[1:-1] for _ in piece.text]
        shown = [KINDS.get(style, " ") for style in styles]
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
    step = simulate(order("1f1b", 4, 1, 4), Costs.even(4))
    lines = timeline_plain(step).splitlines()
    assert "step 21 s, utilization 57.1 %, idle 42.9 %" in lines[0]
    assert all(line.endswith("57.1 %") for line in lines[1:5])


def test_without_a_terminal_rich_prints_the_plain_text():
    step = timeline("zbv", 4, 2, 8)
    written = io.StringIO()
    Console(file=written, width=120, soft_wrap=True).print(timeline_rich(step, 120), end="")
    plain = "".join(line.rstrip() + "\n" for line in written.getvalue().splitlines())
    assert plain == timeline_plain(step, 120)


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
    shown = rows(step, 32)
    assert shown == [*range(15), None, *range(49, 64)]
    assert "34 more" in timeline_plain(step)
    assert rows(step, 64) == [*range(64)]


# --- SVG ------------------------------------------------------------------------------------------


def boxes(picture: str) -> list[ElementTree.Element]:
    """Return the boxes of actions, which have a hover text."""
    root = ElementTree.fromstring(picture)
    return [rect for rect in root.iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]


@pytest.mark.parametrize(("schedule", "virtual"), SCHEDULES)
def test_every_action_has_a_box_in_its_place(schedule, virtual):
    step = timeline(schedule, 3, virtual, 6)
    spans = [span for spans in step.ranks for span in spans]
    drawn = boxes(timeline_svg(step, width=1200))
    scale = (1200 - 62 - 58) / step.makespan
    assert len(drawn) == len(spans)
    for box, span in zip(drawn, spans, strict=True):
        kind, stage, batch, _ = span.action
        assert box.get("class", "").split()[0] == kind.lower()
        assert float(box.get("x", 0)) == pytest.approx(62 + span.start * scale, abs=0.01)
        width = float(box.get("width", 0))
        assert width == pytest.approx((span.end - span.start) * scale, abs=1.01)
        assert f"micro batch {batch}, stage {stage}:" in (box.findtext(f"{SVG}title") or "")


def test_later_stages_of_a_rank_are_lighter():
    step = timeline("zbv", 3, 2, 6)
    spans = [span for spans in step.ranks for span in spans]
    for box, span in zip(boxes(timeline_svg(step)), spans, strict=True):
        assert box.get("class", "").endswith(" late") == (span.action.stage >= 3)


def test_a_long_step_stands_on_two_scales_of_time():
    """The same seconds are equally wide in both, and the last action ends where the picture does."""
    step = timeline("gpipe", 2, 1, 300)
    drawn = boxes(timeline_svg(step))
    half = (960 - 62 - 58 - 26) / 2
    begin, end = windows(step, (960 - 62 - 58 - 26) / 7)
    first = [float(box.get("x", 0)) for box in drawn if float(box.get("x", 0)) < 62 + half]
    assert first[1] - first[0] == pytest.approx(0.0101 / begin.seconds * half, abs=0.02)
    assert begin.seconds == pytest.approx(end.seconds)
    ends = [float(box.get("x", 0)) + float(box.get("width", 0)) for box in drawn]
    assert max(ends) == pytest.approx(960 - 58, abs=1.01)
    assert all(62 <= x <= 960 - 58 for x in first)


def test_boxes_are_labeled_where_they_are_wide_enough():
    wide = ElementTree.fromstring(timeline_svg(timeline("1f1b", 4, 1, 4)))
    labels = [
        text.text or ""
        for text in wide.iter(f"{SVG}text")
        if "in" in (text.get("class") or "").split()
    ]
    assert sorted(labels) == sorted(4 * [f"{kind}{batch}" for kind in "FB" for batch in range(4)])
    narrow = ElementTree.fromstring(timeline_svg(timeline("1f1b", 4, 1, 60)))
    for text in narrow.iter(f"{SVG}text"):
        assert "in" not in (text.get("class") or "").split() or (text.text or "")[:1] != "F"


def test_a_picture_loads_nothing_and_the_page_has_its_style():
    """Every class that it uses is in the style of the pages."""
    picture = timeline_svg(timeline("zbv", 4, 2, 8))
    assert re.findall(r"(?:https?:|href|@import)[^\s>\"]*", picture) == [
        "http://www.w3.org/2000/svg"
    ]
    style = (Path(page.__file__).parent / "templates" / "style.css").read_text(encoding="utf-8")
    classes = {name for names in re.findall(r'class="([^"]*)"', picture) for name in names.split()}
    assert classes >= {"timeline", "f", "i", "w", "late", "hatch-i", "hatch-w", "idle"}
    assert classes <= set(re.findall(r"\.([a-z][a-z0-9-]*)", style))


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "virtual"), SCHEDULES)
def test_large_pipelines_make_pictures_of_some_hundred_kilobytes(schedule, virtual):
    picture = timeline_svg(timeline(schedule, 32, virtual, 256))
    root = ElementTree.fromstring(picture)
    assert len(picture) < 500_000
    assert sum(1 for text in root.iter(f"{SVG}text") if (text.text or "").startswith("rank ")) == 32
