"""The frame, the style and the tables of the pages of plans and of runs."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

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
.wide { overflow-x: auto; } .wide svg { min-width: 760px; }
pre { overflow-x: auto; font-size: .85rem; border-left: 3px solid var(--rule); padding-left: .8rem; }
.pictures { display: flex; flex-wrap: wrap; gap: 10px 20px; }
.picture text { fill: var(--ink); font: 11px ui-sans-serif, system-ui, sans-serif; }
.picture .limit { stroke: #d1242f; stroke-width: 2; stroke-dasharray: 4 3; }
.picture .grid { stroke: var(--rule); } .picture .dot { fill: #4c78a8; opacity: .45; }
.picture .curve { fill: none; stroke: #4c78a8; stroke-width: 1.5; } .picture .curve-1 { stroke: #f58518; }
.picture .point-0 { fill: #4c78a8; } .picture .point-1 { fill: #f58518; } .picture .bad { fill: #d1242f; }
.picture .level { stroke: #54a24b; stroke-width: 1.5; stroke-dasharray: 5 4; }
.picture .start { stroke: var(--ink); opacity: .35; stroke-dasharray: 2 3; }
.picture .front { fill: #e45756; } .picture .front-line { fill: none; stroke: #e45756; stroke-width: 1.5; }
"""


def wide(svg: str) -> str:
    """Wrap a picture so that a narrow window scrolls it instead of shrinking it."""
    return f'<div class="wide">{svg}</div>'


def table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; the first column, and a column of arithmetic, hold text, the others numbers."""
    kinds = ["how" if name == "how" else "n" if place else "" for place, name in enumerate(names)]
    head = "".join(f'<th class="{k}">{escape(n)}</th>' for k, n in zip(kinds, names, strict=True))
    body = [
        "".join(f'<td class="{k}">{escape(cell)}</td>' for k, cell in zip(kinds, row, strict=True))
        for row in rows
    ]
    return "\n".join(["<table>", *(f"<tr>{line}</tr>" for line in [head, *body]), "</table>"])


def page(title: str, parts: Sequence[str]) -> str:
    """Return the whole page."""
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
