"""A plan as one self-contained page: no script, no other file."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from nanoscale.common.units import byte_size, duration
from nanoscale.plan.predict import Prediction
from nanoscale.plan.search.search import SearchResult
from nanoscale.view.page import page, table, wide
from nanoscale.view.plan.explain import how
from nanoscale.view.plan.memory_svg import memory_svg
from nanoscale.view.plan.prediction_text import MEANINGS, head, outcome, verdict
from nanoscale.view.plan.search_svg import name_of, search_svg
from nanoscale.view.plan.timeline_svg import timeline_svg


def prediction_page(plan: Prediction) -> str:
    """Return the page of one layout: memory, the step and the pipeline's timeline, with the arithmetic."""
    first, *rest = head(plan)
    fits = "yes" if plan.fits else "no"
    parts = [
        f"<h1>{escape(first)}</h1>",
        *(f"<p>{escape(line)}</p>" for line in rest),
        f'<p class="verdict {fits}">{escape(verdict(plan))}</p>',
        "<h2>Memory</h2>",
        wide(memory_svg(plan.memory, plan.capacity)),
        _memory_table(plan),
        "<h2>A step</h2>",
        *(f"<p>{escape(line)}</p>" for line in outcome(plan)),
        _time_table(plan),
    ]
    if plan.timeline is not None:
        parts += ["<h2>The pipeline</h2>", wide(timeline_svg(plan.timeline))]
    return page(first, parts)


def search_page(result: SearchResult, why: Sequence[str]) -> str:
    """Return the page of a search: all fitting layouts as a scatter, and the best in full. One must fit."""
    best = result.best
    assert best is not None
    title = f"{best.config.model.name}: {result.considered:,} layouts looked at, {len(result.ranked):,} fit"
    front = result.front()
    rows = [
        (
            name_of(plan),
            byte_size(plan.worst.total),
            f"{plan.time.tokens_per_s_per_gpu:,.0f}",
            f"{plan.time.mfu:.1%}",
        )
        for plan in reversed(front)
    ]
    parts = [
        f"<h1>{escape(title)}</h1>",
        wide(search_svg(result.ranked, front)),
        "<h2>The Pareto front</h2>",
        table(("layout", "memory", "tokens/s a device", "MFU"), rows),
        "<h2>Why the fastest is the fastest</h2>",
        "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in why) + "</ul>",
        "<h2>Its memory</h2>",
        wide(memory_svg(best.memory, best.capacity)),
    ]
    if best.timeline is not None:
        parts += ["<h2>Its pipeline</h2>", wide(timeline_svg(best.timeline))]
    return page(title, parts)


def _memory_table(plan: Prediction) -> str:
    parts = [part for part in plan.worst.parts if part.bytes]
    rows = [(part.name, byte_size(part.bytes), part.how) for part in parts]
    return table(("part", "memory", "how"), rows)


def _time_table(plan: Prediction) -> str:
    reasons, whole = how(plan.config, plan.hardware, plan.time, plan.software), plan.time.seconds
    rows = []
    for name, meaning in MEANINGS.items():
        seconds = getattr(plan.time.parts, name)
        if seconds > 0:
            share = f"{seconds / whole:.1%}"
            rows.append((meaning, duration(seconds), share, reasons.get(name, "")))
    return table(("part", "time", "share", "how"), rows)
