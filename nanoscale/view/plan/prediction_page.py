"""The pages of a plan and of a search."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nanoscale.common.units import GIB, byte_size, duration
from nanoscale.plan.predict import Prediction
from nanoscale.plan.search.search import SearchResult
from nanoscale.view.charts import Bar, Point, scatter, stacked_bars
from nanoscale.view.page import render
from nanoscale.view.plan.explain import how
from nanoscale.view.plan.memory_text import shown
from nanoscale.view.plan.prediction_text import MEANINGS, head, outcome, recomputation, verdict
from nanoscale.view.plan.timeline_svg import timeline_svg

MOST_POINTS = 2000
"""The most layouts in the chart of a search."""
_COLORS = {
    "weights": "#4c78a8",
    "compute copies": "#72b7b2",
    "gradients": "#54a24b",
    "optimizer": "#eeca3b",
    "units in flight": "#9ecae9",
    "activations": "#b279a2",
    "logits and loss": "#e45756",
    "communication buffers": "#f58518",
    "fragmentation": "#bab0ac",
    "context": "#79706e",
}
"""The color of each part of memory."""


def prediction_page(plan: Prediction) -> str:
    """Return the page of one layout: memory, the step and the pipeline's timeline, with the arithmetic."""
    title, *rest = head(plan)
    parts = [part for part in plan.worst.parts if part.bytes]
    return render(
        "plan.html",
        title=title,
        head=rest,
        fits=plan.fits,
        verdict=verdict(plan),
        memory_chart=memory_chart(plan),
        memory=[(part.name, byte_size(part.bytes), part.how) for part in parts],
        outcome=outcome(plan),
        step=list(_step(plan)),
        timeline=_timeline(plan),
    )


def search_page(result: SearchResult, why: Sequence[str]) -> str:
    """Return the page of a search: all fitting layouts as a scatter, and the best in full. One must fit."""
    best = result.best
    assert best is not None
    title = f"{best.config.model.name}: {result.considered:,} layouts considered, {len(result.ranked):,} fit"
    front = [
        (
            name_of(plan),
            byte_size(plan.worst.total),
            f"{plan.time.tokens_per_s_per_gpu:,.0f}",
            f"{plan.time.mfu:.1%}",
        )
        for plan in reversed(result.front())
    ]
    return render(
        "search.html",
        title=title,
        layouts_chart=layouts_chart(result.ranked, result.front()),
        front=front,
        why=why,
        memory_chart=memory_chart(best),
        timeline=_timeline(best),
    )


def memory_chart(plan: Prediction) -> str:
    """Return a bar per pipeline rank; hovering over a part shows its size and arithmetic."""
    bars = [
        number
        if number is None
        else Bar(
            f"rank {number}",
            [
                (part.name, part.bytes, f"{part.name}: {byte_size(part.bytes)} = {part.how}")
                for part in plan.memory[number].parts
            ],
            byte_size(plan.memory[number].total),
        )
        for number in shown(plan.memory, plan.worst)
    ]
    limit = plan.capacity, f"{byte_size(plan.capacity)} of the device"
    return stacked_bars("Memory of every pipeline rank", bars, _COLORS, limit)


def layouts_chart(ranked: Sequence[Prediction], front: Sequence[Prediction]) -> str:
    """Return memory to the right, speed upwards; hovering over a point shows its layout."""
    some = ranked[:: max(1, len(ranked) // MOST_POINTS)]
    names = ("GiB on the fullest device", "tokens/s per device")
    points, best = list(map(_point, some)), list(map(_point, front))
    return scatter("Layouts by memory and speed", names, points, best)


def _point(plan: Prediction) -> Point:
    speed, size = plan.time.tokens_per_s_per_gpu, plan.worst.total
    hint = f"{name_of(plan)}: {byte_size(size)}, {speed:,.0f} tokens/s per device"
    return size / GIB, speed, hint


def name_of(plan: Prediction) -> str:
    """Describe a layout briefly."""
    config = plan.config
    layout = config.parallel
    degrees = [f"{axis} {getattr(layout, axis)}" for axis in ("dp", "tp", "pp", "cp")]
    if config.model.experts:
        degrees.append(f"ep {layout.ep}")
    words = [*degrees, f"ZeRO {config.zero.stage}"]
    if layout.pp > 1:
        words.append(f"{layout.schedule} ×{layout.virtual_stages}")
    recomputed = recomputation(layout)
    return ", ".join([*words, f"micro batch {config.train.micro_batch}", f"recompute {recomputed}"])


def _timeline(plan: Prediction) -> str | None:
    return None if plan.timeline is None else timeline_svg(plan.timeline)


def _step(plan: Prediction) -> Iterator[tuple[str, str, str, str]]:
    """Yield each part of the step that takes time, with its share and arithmetic."""
    reasons, whole = how(plan.config, plan.hardware, plan.time), plan.time.seconds
    for name, meaning in MEANINGS.items():
        seconds = getattr(plan.time.parts, name)
        if seconds > 0:
            yield meaning, duration(seconds), f"{seconds / whole:.1%}", reasons.get(name, "")
