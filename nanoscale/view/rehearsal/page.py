"""A rehearsal as one self-contained page: no script, no other file."""

from __future__ import annotations

from html import escape
from typing import Any

from nanoscale.common.units import byte_size
from nanoscale.view.page import page, table, wide
from nanoscale.view.rehearsal.memory_svg import phases_svg, timeline_svg
from nanoscale.view.rehearsal.text import head, mistakes, verdict


def rehearsal_page(result: dict[str, Any]) -> str:
    """Return the page: memory in time and by phase, ranks, collectives, waits and mistakes."""
    title = head(result)
    worst = next(rank for rank in result["ranks"] if rank["rank"] == result["worst_rank"])
    wrong = list(mistakes(result))
    good = result["fits"] is not False and not wrong
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="verdict {"yes" if good else "no"}">{escape(verdict(result))}</p>',
        *([f"<pre>{escape(chr(10).join(wrong))}</pre>"] if wrong else []),
        *(f"<p>{escape(note)}</p>" for note in result["notes"]),
        f"<h2>Memory of rank {worst['rank']} in the last step</h2>",
        wide(timeline_svg(worst["timeline"], result["capacity"])),
        f"<h2>Peaks of rank {worst['rank']} by phase</h2>",
        wide(phases_svg(worst["phases"])),
        "<h2>Ranks</h2>",
        _ranks(result),
        "<h2>Collectives of a step</h2>",
        _collectives(result),
        "<h2>Waits for the device</h2>",
        _waits(result),
    ]
    return page(title, parts)


def _ranks(result: dict[str, Any]) -> str:
    names = ("rank", "stands for", "allocated", "reserved", "host", "checkpoint", "highest in")
    rows = [
        (
            str(rank["rank"]),
            f"{rank['stands_for']:,}",
            *(byte_size(rank[name]) for name in ("allocated", "reserved", "host")),
            byte_size(rank["checkpoint"].get("bytes", 0)),
            rank["peak_phase"],
        )
        for rank in result["ranks"]
    ]
    return table(names, rows)


def _collectives(result: dict[str, Any]) -> str:
    rows = [
        (
            f"{row['axis']}: {row['kind']}",
            f"{row['ranks']:,}",
            f"{row['count']:,}",
            byte_size(row["bytes"]),
        )
        for row in result["collectives"]
    ]
    return table(("axis and kind", "ranks", "calls", "bytes"), rows) if rows else "<p>None.</p>"


def _waits(result: dict[str, Any]) -> str:
    rows = [
        (wait["line"], wait["what"], wait["phase"], f"{wait['times']:,}", str(rank["rank"]))
        for rank in result["ranks"]
        for wait in rank["waits"]
    ]
    names = ("line", "what", "phase", "count", "rank")
    return table(names, rows) if rows else "<p>None.</p>"
