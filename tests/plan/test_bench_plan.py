"""The table of `make bench-plan`, from sources whose machines are known."""

from __future__ import annotations

from dataclasses import replace

from nanoscale.plan.calibration import Observation
from nanoscale.plan.predict import predict
from scripts.bench_plan import held_out, render
from tests.plan.machines import changed, job, machine

ASSUMED = machine("h100-sxm")
SLOWER = changed(ASSUMED, matmul=0.52, attention=0.28, memory=0.696)


def source(true, *lengths):
    configs = [job("gpt2", seq_len=length, dp=1, micro_batch=8) for length in lengths]
    return [Observation("row", c, ASSUMED, predict(c, true).time.seconds) for c in configs]


def test_a_source_is_judged_by_what_the_others_teach():
    observed = {"first": source(SLOWER, 512, 1024), "second": source(SLOWER, 768)}
    found = held_out(observed, "second")
    assert (found.assumed.rows, found.learned_from) == (1, 2)
    assert found.assumed.worst > 0.15 and abs(found.calibrated.worst) < 0.02
    observed["second"][0] = replace(observed["second"][0], seconds=1e9)
    assert held_out(observed, "second").efficiency == found.efficiency


def test_it_is_said_where_calibration_makes_it_worse_or_cannot_be():
    observed = {"first": source(SLOWER, 512), "second": source(ASSUMED, 768)}
    speeds = [held_out(observed, name) for name in observed]
    assert "second: 0.0% as assumed" in render(speeds, {}).partition("worse calibrated")[2]
    alone = held_out({"first": observed["first"]}, "first")
    assert alone.calibrated is None
    assert "no other source has this device" in render([*speeds, alone], {})
