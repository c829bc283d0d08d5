"""Shared parts of the tests of several rooms: their markers and order, and the summary at the end."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

gc.disable()  # until the tests are collected: what is imported is not garbage
pytest.register_assert_rewrite("tests.support")
TESTS = Path(__file__).parent
LONGEST_FIRST = ("cluster", "train", "project", "backends", "rehearse", "parallel", "cli", "launch")
"""Rooms; the others are light and fill the workers' time at the end."""
_DEVIATION = "deviation"
Deviations = Callable[[str, str, tuple[float, float]], None]


@pytest.fixture
def deviations(record_property: Callable[[str, Any], None]) -> Deviations:
    """Note how far a layout went from the plain loop in a precision: its loss and its gradient norm."""
    return lambda layout, precision, figures: record_property(
        _DEVIATION, [layout, precision, *map(float, figures)]
    )


@pytest.fixture(autouse=True, scope="session")
def settings_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Sign runs of the tests with a secret of their own, not with the user's."""
    os.environ["XDG_CONFIG_HOME"] = str(tmp_path_factory.mktemp("settings"))


@pytest.fixture(scope="module")
def forked_ranks() -> Iterator[None]:
    """Let commands start their ranks without agents: see `tests/support/forked_jobs.py`."""
    from tests.support.forked_jobs import forked_jobs

    with forked_jobs():
        yield


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Several threads would wait for each other longer than models of this size compute."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests of clusters and of real ranks, and begin with the rooms that take longest."""
    for item in items:
        if _room(item) == "cluster":
            item.add_marker("cluster")
        if isinstance(item, pytest.Function) and _starts_ranks(item):
            item.add_marker("ranks")
    order = {room: place for place, room in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: order.get(_room(item), len(order)))


def _room(item: pytest.Item) -> str:
    return item.path.relative_to(TESTS).parts[0] if item.path.is_relative_to(TESTS) else ""


def _starts_ranks(item: pytest.Function) -> bool:
    """True if its file starts real ranks with `tests.support`."""
    return not vars(item.module).keys().isdisjoint({"run_ranks", "train"})


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.support.schedule import Schedule

    return Schedule(config, log)


def pytest_configure(config: pytest.Config) -> None:
    from tests.support.processor_time import ProcessorTime

    config.pluginmanager.register(ProcessorTime(config))


def pytest_collection_finish() -> None:
    """Collect garbage again, and never search modules and tests for it."""
    gc.freeze()
    gc.enable()


def pytest_sessionstart() -> None:
    """Restore Ctrl-C: processes that a shell starts in the background ignore it, and the tests' would inherit
    that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    rows: dict[str, dict[str, list[float]]] = defaultdict(dict)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) != "call":
                continue
            for name, value in report.user_properties:
                if name == _DEVIATION:
                    layout, precision, *figures = value
                    rows[layout][precision] = figures
    if not rows:
        return
    terminalreporter.section("largest relative deviation from a plain loop")
    head = ("fp64 loss", "fp64 norm", "fp32 loss", "fp32 norm")
    terminalreporter.write_line(f"{'layout':44}" + "".join(f"{name:>12}" for name in head))
    for layout, by_precision in sorted(rows.items()):
        cells = [
            f"{figure:12.1e}" if precision in by_precision else f"{'':12}"
            for precision in ("fp64", "fp32")
            for figure in by_precision.get(precision, (0.0, 0.0))
        ]
        terminalreporter.write_line(f"{layout:44}{''.join(cells)}".rstrip())
