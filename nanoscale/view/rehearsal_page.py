"""The page of a rehearsal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from nanoscale.common.units import GIB, byte_size
from nanoscale.view.charts import Bar, curves, stacked_bars
from nanoscale.view.page import render
from nanoscale.view.rehearsal_text import advice, head, mistakes, verdict

_COLORS = {
    "weights": "#4c78a8",
    "gathered weights": "#9ecae9",
    "gradients": "#54a24b",
    "optimizer": "#eeca3b",
    "activations": "#b279a2",
    "communication": "#f58518",
    "temporary": "#bab0ac",
}
"""The color of each purpose of memory."""


def rehearsal_page(result: dict[str, Any], changes: Sequence[dict[str, str]]) -> str:
    """Return the page: memory by phase and in time, ranks, collectives, waits and what to change."""
    worst = next(rank for rank in result["ranks"] if rank["rank"] == result["worst_rank"])
    wrong = list(mistakes(result))
    return render(
        "rehearsal.html",
        title=head(result),
        good=result["fits"] is not False and not wrong,
        verdict=verdict(result),
        wrong=[*wrong, *advice(result, changes)],
        notes=result["notes"],
        worst=worst["rank"],
        phases_chart=phases_chart(worst, result["capacity"]),
        timeline_chart=timeline_chart(worst["timeline"]),
        mesh=_mesh(result["degrees"]),
        ranks=list(_ranks(result)),
        collectives=[
            (
                f"{row['axis']}: {row['kind']}",
                f"{row['ranks']:,}",
                f"{row['count']:,}",
                byte_size(row["bytes"]),
            )
            for row in result["collectives"]
        ],
        waits=[
            (wait["line"], wait["what"], wait["phase"], f"{wait['times']:,}", rank["rank"])
            for rank in result["ranks"]
            for wait in rank["waits"]
        ],
    )


def phases_chart(rank: dict[str, Any], capacity: int | None) -> str:
    """Return a bar for each phase's peak; hovering over a part shows its size."""
    bars = [
        Bar(
            name,
            [(kind, size, f"{kind}: {byte_size(size)}") for kind, size in phase["kinds"].items()],
            byte_size(phase["peak"]),
        )
        for name, phase in rank["phases"].items()
    ]
    limit = max([1, *(phase["peak"] for phase in rank["phases"].values())])
    mark = (capacity, f"{byte_size(capacity)} of the device") if capacity else (limit, "the peak")
    return stacked_bars("Peaks of memory by phase and purpose", bars, _COLORS, mark)


def timeline_chart(values: list[int]) -> str:
    """Return the memory that tensors hold in the course of a step, GiB."""
    points: list[tuple[int, float | None]] = [(at, size / GIB) for at, size in enumerate(values)]
    return curves(
        "GiB of tensors", [("", points)], from_zero=True, axis="operation", width=960, height=260
    )


def _mesh(degrees: dict[str, int]) -> str:
    """Describe the order of ranks."""
    axes = [f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1]
    return "mesh " + " × ".join(axes) if axes else "one process"


def _ranks(result: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for rank in result["ranks"]:
        yield (
            str(rank["rank"]),
            f"{rank['stands_for']:,}",
            *(byte_size(rank[name]) for name in ("allocated", "reserved", "host")),
            byte_size(rank["checkpoint"].get("bytes", 0)),
            rank["peak_phase"],
        )
