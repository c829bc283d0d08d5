"""The time of rehearsed steps compared with the plan's, which counts the same work by formulas."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.plan.played_time import ROWS, config_of, measure
from nanoscale.cli.common.rehearsal import rehearsed
from tests.support.rows import usual_rows

BOUND = 0.1
"""The largest relative difference."""


@pytest.mark.parametrize("name", usual_rows({name: name for name in ROWS}, ("ZeRO 3",)))
def test_a_step_takes_as_long_as_planned(name: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("NANOSCALE_CACHE", str(tmp_path))
    config = config_of(name)
    row = measure(name, config, rehearsed(config, "distinct", 2))
    assert row.ratio == pytest.approx(1.0, abs=BOUND)
