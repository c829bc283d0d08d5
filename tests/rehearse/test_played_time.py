"""The time of rehearsed steps compared with the plan's, which counts the same work by formulas."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.plan.played_time import ROWS, config_of, measure
from nanoscale.cli.common.rehearsal import rehearsed
from nanoscale.plan.rehearsed import step_time
from tests.support.rows import usual_rows

BOUND = 0.1
"""The largest relative difference."""


@pytest.mark.parametrize("name", usual_rows({name: name for name in ROWS}, ("ZeRO 3",)))
def test_a_step_takes_as_long_as_planned(name: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("NANOSCALE_CACHE", str(tmp_path))
    config = config_of(name)
    row = measure(name, config, rehearsed(config, "distinct", 2))
    assert row.ratio == pytest.approx(1.0, abs=BOUND)


@pytest.mark.parametrize("hops", [1, 2])
def test_the_work_of_one_block_is_listed_in_order(hops: int) -> None:
    """A ring's attention has a kernel for each hop."""
    attention = ["attention", "flash", "bf16", 1, 64, 64, 4, 16, True]
    works = [
        ["bytes", "embedding", 9],
        [*attention, False],
        ["product", "mm", "bf16", 4, 4, 4, 1, True],
        ["bytes", "triton_0", 7],
        [*attention, True],
    ]
    streams = {
        "works": works,
        "segments": [[0, *[1] * hops, 2], [*[1] * hops, 3, *[4] * hops], [2, 3, *[4] * hops]],
        "calls": [{"kind": "all_reduce_", "ranks": [0, 1]}],
        "events": [(0, "work", 0), (0, "call", 0), (0, "batch", 2), (1, "work", 0)],
    }
    streams["events"] += [(0, "work", 1), (0, "work", 2)]  # type: ignore[attr-defined]
    degrees = {"pp": 1, "dp": 1, "cp": 1, "tp": 2, "ep": 1}
    result = {"ranks": [{"rank": 1}], "streams": {"1": streams}, "degrees": degrees}
    assert step_time.block_order(result) == {
        "forward": [*["flash"] * hops, "mm bf16 4 × 4 × 4", "all_reduce tp"],
        "backward": [*["flash"] * hops, "mm bf16 4 × 4 × 4", "triton_0"],
    }
