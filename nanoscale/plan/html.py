"""A plan as one page that needs nothing else: no script, no file beside it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from nanoscale.plan.how import how
from nanoscale.plan.memory_svg import memory_svg
from nanoscale.plan.part import GIB
from nanoscale.plan.predict import Prediction
from nanoscale.plan.search import Found
from nanoscale.plan.search_svg import name_of, search_svg
from nanoscale.plan.show import MEANINGS, head, outcome, verdict
from nanoscale.plan.timeline_svg import timeline_svg

_STYLE = """
:root { color-scheme: light dark; --ink: #24292f; --paper: #fff; --rule: #d0d7de; --timeline-ink: #24292f;
        --timeline-idle: #eceff2; }
@media (prefers-color-scheme: dark) { :root { --ink: #d5dbe1; --paper: #16191d; --rule: #3a424b;
        --timeline-ink: #d5dbe1; --timeline-idle: #2a3036; } }
body { font: 15px/1.5 ui-sans-serif, system-ui, sans-serif; color: var(--ink); background: var(--paper);
       max-width: 980px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.verdict { font-weight: 600; } .no { color: #d1242f; } .yes { color: #1a7f37; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
td, th { border-bottom: 1px solid var(--rule); padding: .25rem .6rem .25rem 0; text-align: left;
         vertical-align: top; }
td.n, th.n { text-align: right; white-space: nowrap; }
td.how { font-size: .85rem; white-space: pre-wrap; opacity: .8; }
svg { max-width: 100%; height: auto; }
.picture text { fill: var(--ink); font: 11px ui-sans-serif, system-ui, sans-serif; }
.picture .limit { stroke: #d1242f; stroke-width: 2; stroke-dasharray: 4 3; }
.picture .grid { stroke: var(--rule); } .picture .dot { fill: #4c78a8; opacity: .45; }
.picture .front { fill: #e45756; } .picture .front-line { fill: none; stroke: #e45756; stroke-width: 1.5; }
"""


def prediction_page(plan: Prediction) -> str:
    """Memory, the step and the pipeline's timeline of one layout, with the arithmetic."""
    first, *rest = head(plan)
    fits = "yes" if plan.fits else "no"
    parts = [
        f"<h1>{escape(first)}</h1>",
        *(f"<p>{escape(line)}</p>" for line in rest),
        f'<p class="verdict {fits}">{escape(verdict(plan))}</p>',
        "<h2>Memory</h2>",
        memory_svg(plan.memory, plan.capacity),
        _memory_table(plan),
        "<h2>A step</h2>",
        *(f"<p>{escape(line)}</p>" for line in outcome(plan)),
        _time_table(plan),
    ]
    if plan.timeline is not None:
        parts += ["<h2>The pipeline</h2>", timeline_svg(plan.timeline)]
    return _page(first, parts)


def search_page(found: Found, why: Sequence[str]) -> str:
    """All layouts that fit as a scatter, and the best in full. One must fit."""
    best = found.best
    assert best is not None
    title = f"{best.config.model.name}: {found.considered:,} layouts looked at, {len(found.ranked):,} fit"
    front = found.front()
    rows = [
        (
            name_of(plan),
            f"{plan.worst.total / GIB:.1f}",
            f"{plan.time.tokens_per_s_per_gpu:,.0f}",
            f"{plan.time.mfu:.1%}",
        )
        for plan in reversed(front)
    ]
    parts = [
        f"<h1>{escape(title)}</h1>",
        search_svg(found.ranked, front),
        "<h2>The Pareto front</h2>",
        _table(("layout", "GiB", "tokens/s a device", "MFU"), rows),
        "<h2>Why the fastest is the fastest</h2>",
        "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in why) + "</ul>",
        "<h2>Its memory</h2>",
        memory_svg(best.memory, best.capacity),
    ]
    if best.timeline is not None:
        parts += ["<h2>Its pipeline</h2>", timeline_svg(best.timeline)]
    return _page(title, parts)


def _memory_table(plan: Prediction) -> str:
    parts = [part for part in plan.worst.parts if part.bytes]
    rows = [(part.name, f"{part.bytes / GIB:.3f}", part.how) for part in parts]
    return _table(("part", "GiB", "how"), rows)


def _time_table(plan: Prediction) -> str:
    reasons, whole = how(plan.config, plan.hardware, plan.time), plan.time.seconds
    rows = []
    for name, meaning in MEANINGS.items():
        seconds = getattr(plan.time.parts, name)
        if seconds > 0:
            share = f"{seconds / whole:.1%}"
            rows.append((meaning, f"{1e3 * seconds:,.1f}", share, reasons.get(name, "")))
    return _table(("part", "ms", "share", "how"), rows)


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column is of words, and so is one that says how; the others are of numbers."""
    kinds = ["how" if name == "how" else "n" if place else "" for place, name in enumerate(names)]
    head = "".join(f'<th class="{k}">{escape(n)}</th>' for k, n in zip(kinds, names, strict=True))
    body = [
        "".join(f'<td class="{k}">{escape(cell)}</td>' for k, cell in zip(kinds, row, strict=True))
        for row in rows
    ]
    return "\n".join(["<table>", *(f"<tr>{line}</tr>" for line in [head, *body]), "</table>"])


def _page(title: str, parts: Sequence[str]) -> str:
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            f'<head><meta charset="utf-8"><title>{escape(title)}</title>',
            '<meta name="viewport" content="width=device-width">',
            f"<style>{_STYLE}</style></head>",
            "<body>",
            *parts,
            "</body>",
            "</html>",
            "",
        ]
    )
