"""What tests of several folders share."""

from __future__ import annotations

from typing import Any

import pytest

_DEVIATIONS: dict[str, list[float]] = {}


@pytest.fixture
def deviations() -> dict[str, list[float]]:
    """How far each layout went from the plain loop: fp64's loss and gradient norm, then fp32's."""
    return _DEVIATIONS


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not _DEVIATIONS:
        return
    terminalreporter.section("largest relative deviation from a plain loop over 20 steps")
    head = ("fp64 loss", "fp64 norm", "fp32 loss", "fp32 norm")
    terminalreporter.write_line(f"{'layout':44}" + "".join(f"{name:>12}" for name in head))
    for name, figures in _DEVIATIONS.items():
        cells = "".join(f"{figure:12.1e}" for figure in figures)
        terminalreporter.write_line(f"{name:44}{cells}")
