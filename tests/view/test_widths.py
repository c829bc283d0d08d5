"""Reports on terminals of several widths, and their colors."""

from __future__ import annotations

import html
import io
import re
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.color import Color
from rich.style import Style

from nanoscale.common.display import console
from nanoscale.config.composing.compose import compose
from nanoscale.config.rules import check
from nanoscale.plan.hardware.planned_devices import planned_devices
from nanoscale.plan.predict import predict
from nanoscale.view.blocks import LOOKS, Chart, Lines, Report, page, show, state_style, table
from nanoscale.view.plan import pictures
from nanoscale.view.plan.prediction import prediction_report
from nanoscale.view.run.run_table import _FIRST, _USUAL
from nanoscale.view.run.top_table import top_table

STYLE = Path(pictures.__file__).parents[1] / "style.css"
NAME = "llama-1b-second-sweep-lr=1e-4,seed=12345-2026-11-27"
STATES = ("running", "queued (12345)", "failed", "completed", "running, then lost", "prepared")


def top_rows() -> list[dict[str, Any]]:
    """Return a run of each state, the first with a long name and a long event."""
    known = {"step": 12345, "steps": 100000, "loss": 2.3456, "losses": [3.0, 2.0] * 8, "eta_s": 3e4}
    known |= {
        "tokens_per_s": 123456.0,
        "planned_tokens_per_s": 130000.0,
        "memory_gib": 61.5,
        "goodput": 0.9,
    }
    known |= {"state": "running", "model": "llama-1b", "attempt": 1, "created": 1.7e9}
    event = "step-00012000 saved in 71.9 ms, and rank 3 on h2 is 0.4 s late in every step"
    return [
        known | {"name": f"{NAME}-{place}" if place else NAME, "message": state, "event": event}
        for place, state in enumerate(STATES)
    ]


@cache
def reports() -> dict[str, Report]:
    words = [
        "recipe=llama-70b",
        "cluster=h100-sxm",
        "cluster.hosts=16",
        "parallel=dp",
        "zero=stage1",
    ]
    words += ["parallel.tp=8", "parallel.pp=4", "train.micro_batch=1", "train.tokens=140G"]
    composed = compose(words)
    plan = predict(check(composed, planned_devices(composed)))
    return {
        "plan": prediction_report(plan, explain=False),
        "explained plan": prediction_report(plan, explain=True),
        "top": Report("", [top_table(top_rows())]),
        "runs ls": Report("", [table([*_FIRST, *_USUAL], top_rows())]),
    }


@pytest.mark.parametrize("width", [60, 80, 160, 200])
@pytest.mark.parametrize("name", ["plan", "explained plan", "top", "runs ls"])
def test_no_word_is_broken(name: str, width: int) -> None:
    report = reports()[name]
    shown = printed(report, width)
    charts = [block.draw(width) for block in report.blocks if isinstance(block, Chart)]
    whole = printed(report, 2000) + "".join(map(str, charts))
    assert "…" not in shown and max(map(len, shown.splitlines())) <= width
    names = "".join(f"{row['name']} " for row in top_rows())
    words = {*whole.split(), *re.findall(r"[^-_=, ]+[-_=,]?", names)}
    unknown = (word for word in shown.split() if word not in words)
    assert not [it for it in unknown if not {*re.findall(r"[^-_=,]+[-_=,]?", it)} <= words]
    if name == "top":
        assert shown.count("running") == 2 and shown.count("123,456 (95%)") == len(STATES)
        lines = shown.splitlines()
        starts = [place for place, line in enumerate(lines) if line.startswith("llama-1b-")]
        assert len(starts) == len(STATES) and max(b - a for a, b in pairwise(starts)) <= 3
        assert ("saved" in shown) == (width >= 160)


def printed(report: Report, width: int) -> str:
    with io.StringIO() as stream:
        screen = console(stream)
        screen._force_terminal, screen.width, screen.soft_wrap = True, width, False
        screen._color_system = None
        show(screen, report)
        return stream.getvalue()


def test_a_path_that_is_wider_than_the_terminal_can_be_copied() -> None:
    path = "/a" * 40
    assert path in printed(Report(f"run directory {path}", [Lines([f"log {path}"])]), 60)


def test_letters_are_legible_and_states_look_different() -> None:
    """Contrast of at least 4.5, as WCAG 2.1 asks for (1.4.3), also on pages, by day and by night."""
    styles = [*(style for _, style in pictures.LOOKS.values()), *pictures._STYLE.values()]
    for style in map(Style.parse, styles):
        assert style.color and style.bgcolor
        assert contrast(*(tuple(it.get_truecolor()) for it in (style.color, style.bgcolor))) >= 4.5
    css = STYLE.read_text()
    for theme in css.split("@media (prefers-color-scheme: dark)")[:2]:
        colors = dict(re.findall(r"--(\w+): (#[0-9a-f]{3,6});", theme))
        for name in ("ink", "red", "green", "blue", "yellow"):
            ink, paper = (
                tuple(Color.parse("#" + (it[1:] if len(it) == 7 else it[1:] * 2)).get_truecolor())
                for it in (colors[name], colors["paper"])
            )
            assert contrast(ink, paper) >= 4.5, name
    looks = [state_style("state", state) for state in STATES[:4]]
    assert all(looks) and len({*looks}) == 4
    assert state_style("state", "running, then lost") == LOOKS["failed"]
    assert state_style("run", "running") == ""


def contrast(*colors: tuple[int, ...]) -> float:
    lights = []
    for color in colors:
        shares = (it / 255 for it in color)
        red, green, blue = (
            it / 12.92 if it <= 0.04045 else ((it + 0.055) / 1.055) ** 2.4 for it in shares
        )
        lights.append(0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05)
    return max(lights) / min(lights)


def test_a_page_on_a_phone_keeps_speed_memory_and_time() -> None:
    css = STYLE.read_text()
    narrow = css[css.index("@media (max-width: 600px)") :].partition("\n}")[0]
    assert re.search(r"\.wide, \.optional \{ display: none; \}", narrow)
    text = page(reports()["top"])
    for header in ("run", "state", "tokens/s (of plan)", "memory", "ETA"):
        assert re.search(rf'<th( class="n")?>{re.escape(header)}</th>', text), header
    for header in ("step", "loss", "curve", "last event"):
        assert re.search(rf'<th class="(n )?optional">{header}</th>', text), header
    assert '<td class="bold red">failed</td>' in text and '<td class="green">completed</td>' in text
    drawn = page(reports()["plan"])
    assert drawn.startswith("<!doctype html>") and "<title>Plan of llama-70b, " in drawn
    (memory, pipeline) = re.findall(r'<pre class="narrow">(.*?)</pre>', drawn, re.DOTALL)
    lines = re.sub("<[^>]+>", "", html.unescape(memory + pipeline)).splitlines()
    assert max(map(len, lines)) <= 60
