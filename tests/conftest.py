"""What tests of several folders share."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import Any

import pytest

pytest.register_assert_rewrite("tests.support")
_DEVIATION = "deviation"
Deviations = Callable[[str, list[float]], None]


@pytest.fixture
def deviations(record_property: Callable[[str, Any], None]) -> Deviations:
    """Notes how far a layout went from the plain loop: fp64's loss and gradient norm, then fp32's."""
    return lambda layout, figures: record_property(_DEVIATION, [layout, *map(float, figures)])


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Several threads would wait for each other longer than models of this size compute."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def pytest_sessionstart() -> None:
    """What a shell starts in the background ignores Ctrl-C, and what the tests start would inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


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
