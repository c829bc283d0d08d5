"""The output of a scaling test: a table, and a page with charts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanoscale.common.units import GIB, byte_size, duration
from nanoscale.view.charts import Curve, curves
from nanoscale.view.page import render

if TYPE_CHECKING:
    from rich.console import Console

Document = dict[str, Any]
_NAMES = ("step", "tokens/s", "a device", "speed-up", "planned", "efficiency", "planned", "memory")


def print_scaling(screen: Console, about: Document) -> None:
    """Print the table of a scaling test."""
    from rich.table import Table

    from nanoscale.common.display import print_table

    screen.print(_title(about), markup=False, soft_wrap=True)
    table = Table(about["axis"], *_NAMES, box=None, pad_edge=False)
    for row in _rows(about):
        table.add_row(*row)
    print_table(screen, table)


def scaling_page(about: Document) -> str:
    """Return the test as a page with charts."""
    ideal = [point["world_size"] / about["points"][0]["world_size"] for point in about["points"]]
    return render(
        "scaling.html",
        title=_title(about),
        names=[about["axis"], *_NAMES],
        rows=_rows(about),
        charts=[
            _chart(about, "speed-up", "speed_up", ideal),
            _chart(about, "efficiency", "efficiency", [1.0] * len(ideal)),
        ],
    )


def _title(about: Document) -> str:
    points = about["points"]
    batch = "grows with them" if about["weak"] else f"is {points[0]['global_batch']} samples"
    counts = ", ".join(str(point[about["axis"]]) for point in points)
    what = f"{about['model']}, {about['precision']}, {about['backend']} on {about['device']}"
    return f"{what}: {counts} {about['axis']}; the global batch {batch}"


def _rows(about: Document) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for point in about["points"]:
        plan = point["predicted"]
        rows.append(
            (
                str(point[about["axis"]]),
                duration(point["step_time_s"]),
                f"{point['tokens_per_s']:,.0f}",
                f"{point['tokens_per_s_per_device']:,.0f}",
                f"{point['speed_up']:.2f}",
                "" if plan is None else f"{plan['speed_up']:.2f}",
                f"{point['efficiency']:.1%}",
                "" if plan is None else f"{plan['efficiency']:.1%}",
                byte_size(GIB * point["memory_gib"]),
            )
        )
    return rows


def _chart(about: Document, name: str, key: str, ideal: list[float]) -> str:
    points = about["points"]
    counts = [point[about["axis"]] for point in points]
    series: list[tuple[str, Curve]] = [
        ("measured", [(count, point[key]) for count, point in zip(counts, points, strict=True)])
    ]
    planned = [(point["predicted"] or {}).get(key) for point in points]
    if None not in planned:
        series.append(("planned", list(zip(counts, planned, strict=True))))
    series.append(("ideal", list(zip(counts, ideal, strict=True))))
    return curves(name, series, axis=about["axis"], from_zero=True, width=960, height=320)
