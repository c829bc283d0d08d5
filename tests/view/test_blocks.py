"""Reports of blocks: the same content as text and as a page."""

from __future__ import annotations

import io

import pytest

from nanoscale.common.display import console
from nanoscale.view.blocks import Chart, Column, Lines, Report, page, show, table
from nanoscale.view.charts import curves

COLUMNS = (
    Column("run", lambda row: row[0]),
    Column("state", lambda row: row[1], is_text=True),
    Column("loss", lambda row: f"{row[2]:.2f}"),
)
REPORT = Report(
    "a <title>",
    [
        Lines(["the <verdict>"], "bold red"),
        table(COLUMNS, [("first", "done", 10.0), ("2", "on", 2.5)], "the runs"),
        Chart(lambda width: f"{width} columns\n"),
        Chart(lambda _: "as text\n", ["<svg></svg>"], "a curve"),
        Chart(pictures=["<svg></svg>"]),
        Lines([]),
        Lines(["one", "two"]),
    ],
)


def test_text() -> None:
    """Styled lines belong to what follows; what is empty or only a picture leaves no empty line."""
    stream = io.StringIO()
    screen = console(stream)
    screen.width = 70
    show(screen, REPORT)
    assert stream.getvalue().splitlines() == [
        "a <title>",
        "the <verdict>",
        "the runs",
        "run    state   loss",
        "first  done   10.00",
        "2      on      2.50",
        "",
        "70 columns",
        "",
        "as text",
        "",
        "one",
        "two",
    ]


@pytest.mark.parametrize(
    "part",
    [
        "<h1>a &lt;title&gt;</h1>",
        '<p class="bold red">the &lt;verdict&gt;</p>',
        "<h2>The runs</h2>",
        '<tr><th>run</th><th>state</th><th class="n">loss</th></tr>',
        '<tr><td>first</td><td>done</td><td class="n">10.00</td></tr>',
        '<pre class="wide">135 columns\n</pre>',
        '<h2>A curve</h2>\n<div class="pictures"><svg></svg></div>',
        "<p>one</p>\n<p>two</p>",
    ],
)
def test_page(part: str) -> None:
    assert part in page(REPORT) and "as text" not in page(REPORT)


def test_a_page_shows_control_characters() -> None:
    """They would act on a terminal that shows the page's source."""
    shown = page(Report("\x1b]0;title\x07", [Lines(["\x9b31m"])]))
    assert "\x1b" not in shown and "\x9b" not in shown and "\\x1b]0;title\\x07" in shown


def test_a_page_is_no_wider_than_a_phone() -> None:
    style = page(REPORT)
    assert (
        "table { display: block; overflow-x: auto;" in style and "overflow-wrap: anywhere" in style
    )


def test_a_narrow_terminal_breaks_no_word_and_cuts_no_name() -> None:
    names = [f"lr=0.001,rope_theta=10000,seed={number}" for number in (1, 2)]
    columns = [
        Column("trial", str),
        *(Column(name, lambda _: "completed", is_text=True) for name in ("state", "before")),
        Column("evaluation loss", lambda _: "5.4365"),
    ]
    text = "dp auto, tp auto, pp auto, cp auto, ep auto, micro batch auto, ZeRO stage auto"
    with io.StringIO() as stream:
        screen = console(stream)
        screen._force_terminal, screen.width, screen.soft_wrap = True, 60, False
        show(screen, Report("", [Lines([text]), table(columns, names)]))
        printed = stream.getvalue()
    lines = printed.splitlines()
    assert max(map(len, lines)) <= 60 and " ".join(line.strip() for line in lines[:2]) == text
    assert printed.count("completed") == 4 and "…" not in printed
    folded = "".join(line.split()[0] for line in lines[5:])
    assert folded == "".join(names)


def test_long_texts_wrap_in_a_file() -> None:
    stream = io.StringIO()
    screen = console(stream)
    screen.width = 40
    show(
        screen, Report("", [table([Column("part", lambda _: "a"), Column("how", str)], ["x" * 99])])
    )
    assert max(map(len, stream.getvalue().splitlines())) == 40
    assert stream.getvalue().count("x") == 99


@pytest.mark.parametrize(("logarithmic", "lines"), [(False, 2), (True, 1)])
def test_a_curve_is_broken_at_values_that_cannot_be_drawn(logarithmic: bool, lines: int) -> None:
    values = [0.0, -1.0, 2.0, None, 1.0, 2.0, 3.0]
    picture = curves("loss", [("", list(enumerate(values)))], logarithmic=logarithmic)
    assert picture.count("<polyline") == lines and picture.count('class="bad"') == 1
