"""The table of `make bench-plan`, from sources whose machines are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.plan import published_runs
from benchmarks.plan.__main__ import held_out, render
from nanoscale.plan.calibration import Observation
from nanoscale.plan.predict import predict
from tests.plan.machines import changed, job, machine

ASSUMED = machine("h100-sxm")
SLOWER = changed(ASSUMED, matmul=0.52, attention=0.28, memory=0.696)


def source(true, *lengths):
    configs = [job("gpt2", seq_len=length, dp=1, micro_batch=8) for length in lengths]
    return [Observation("row", c, ASSUMED, predict(c, true).time.seconds) for c in configs]


@pytest.mark.slow
def test_a_source_is_judged_by_what_the_others_teach():
    observed = {"a, first": source(SLOWER, 512, 1024), "a, second": source(SLOWER, 768)}
    observed["b, third"] = source(ASSUMED, 768)
    found = held_out(observed, "a, second")
    assert (found.assumed.rows, found.same_software.rows, found.any_software.rows) == (1, 2, 3)
    assert found.assumed.worst > 0.15 and abs(found.same_software.errors.worst) < 0.02
    assert found.any_software.errors.worst > 0.02
    observed["a, second"][0] = replace(observed["a, second"][0], seconds=1e9)
    assert held_out(observed, "a, second").same_software.factors == found.same_software.factors


def test_it_is_said_where_calibration_makes_it_worse_or_cannot_be():
    observed = {"a, first": source(SLOWER, 512), "b, second": source(ASSUMED, 768)}
    speeds = [held_out(observed, name) for name in observed]
    text = render(speeds, {})
    assert "worse with b, second: 0.0% as assumed" in text
    assert speeds[0].same_software is None and "nothing to learn from" in text


@pytest.mark.slow
@pytest.mark.skipif(not published_runs.DEFAULT.is_file(), reason="the measurements are not here")
def test_the_page_of_errors_is_as_the_planner_is():
    page = Path("docs/planner-errors.md")
    assert page.read_text() == published_runs.page(published_runs.compare(published_runs.DEFAULT))
