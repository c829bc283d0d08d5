"""Every part of `make bench` runs, at its smallest size."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.cpu.__main__ import PARTS, main
from tests.support.ranks import run_ranks
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


def full_collections(_rank: int, folder: Path) -> int:
    """Return the full garbage collections of the second turn of nanoscale's loop."""
    from benchmarks.cpu.step import Ours, bench_config
    from nanoscale.data.dataset import open_data

    config = bench_config(1, 0, folder)
    whole = Ours(config, open_data(config.data, config.train, config.model.vocab), folder)
    whole.run(1)
    generations: list[int] = []
    gc.callbacks.append(lambda phase, about: generations.append(about["generation"]))
    whole.run(1)
    whole.agreement.close()
    return generations.count(2)


def test_a_turn_of_the_benchmark_is_a_part_of_a_training(tmp_path: Path) -> None:
    """A training collects all garbage once, at its beginning."""
    assert run_ranks(full_collections, 1, tmp_path) == [0]
