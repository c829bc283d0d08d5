"""What tests of several folders share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_DEVIATION = "deviation"
_CLUSTER = Path(__file__).parent / "cluster"
_HEAVY = ("backends", "checkpoint", "parallel", "train")
"""Folders whose tests have many ranks that compute. They come last: those of clusters mind the time."""

Deviations = Callable[[str, list[float]], None]


@pytest.fixture
def deviations(record_property: Callable[[str, Any], None]) -> Deviations:
    """Notes how far a layout went from the plain loop: fp64's loss and gradient norm, then fp32's."""
    return lambda layout, figures: record_property(_DEVIATION, [layout, *map(float, figures)])


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`make test` runs two groups at a time: the tests of clusters, which mostly wait, and those of a file."""
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(item)))
    items.sort(key=lambda item: (_group(item) != _CLUSTER.name, _group(item).startswith(_HEAVY)))


def _group(item: pytest.Item) -> str:
    if item.path.is_relative_to(_CLUSTER):
        return _CLUSTER.name
    return item.path.relative_to(_CLUSTER.parent).with_suffix("").as_posix()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    rows = [
        value
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", None) == "call"
        for name, value in report.user_properties
        if name == _DEVIATION
    ]
    if not rows:
        return
    terminalreporter.section("largest relative deviation from a plain loop over 20 steps")
    head = ("fp64 loss", "fp64 norm", "fp32 loss", "fp32 norm")
    terminalreporter.write_line(f"{'layout':44}" + "".join(f"{name:>12}" for name in head))
    for layout, *figures in sorted(rows):
        cells = "".join(f"{figure:12.1e}" for figure in figures)
        terminalreporter.write_line(f"{layout:44}{cells}")
