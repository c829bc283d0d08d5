"""Every part of `make bench` runs, at its smallest size."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest

from benchmarks.cpu.__main__ import PARTS, main
from tests.support.rows import exhaustive

CHEAP = ("fanout", "flood", "runs")


@pytest.fixture
def one_core() -> Iterator[None]:
    """Give the programs one thread each: on a busy machine, several would mostly wait for each other."""
    usable = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {random.choice([*usable])})
    yield
    os.sched_setaffinity(0, usable)


@pytest.mark.slow
@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize("part", [it if it in CHEAP else exhaustive(it) for it in PARTS])
def test_a_part_prints_its_figures(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--smallest", part])
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["figure", "ratio"]
    assert len(rows) >= 2
