"""The factor of computing is found again from steps of machines that are known to have it."""

from __future__ import annotations

import pytest

from nanoscale.config.schema import Zero
from nanoscale.plan.calibration import Observation, calibrate, predicted
from nanoscale.plan.predict import predict
from tests.plan.machines import changed, job, machine

ASSUMED = machine("h100-sxm")
SHARDED = Zero(stage=3)
SHORT = job("llama-8b", zero=SHARDED, seq_len=2048, micro_batch=8, global_batch=64)
LONG = job("llama-8b", zero=SHARDED, seq_len=65536, global_batch=8)
NARROW = job("gpt2", seq_len=1024, dp=1, micro_batch=16)
SPREAD = job("llama-8b", zero=SHARDED, seq_len=1024, dp=256, global_batch=256)
STAGES = job("llama-8b", pp=4, dp=2, global_batch=32)


def seen(config, true, times=1.0):
    """Return a run on a machine that truly has these efficiencies."""
    return Observation("run", config, ASSUMED, times * predict(config, true).time.seconds)


def off(run, found):
    return predicted(run, found) / run.seconds - 1


COMPUTING = ("matmul", "attention", "memory")


def slower(factor):
    """Return a machine that computes at this share of the assumed speed."""
    own = ASSUMED.efficiency
    starts = {name: getattr(own, name) / factor for name in ("eager_s", "compiled_s")}
    return changed(ASSUMED, **{name: factor * getattr(own, name) for name in COMPUTING}, **starts)


@pytest.mark.parametrize("config", [SHORT, NARROW, SPREAD, STAGES])
def test_a_run_gives_the_factor_of_computing_which_holds_for_other_jobs(config):
    true = slower(0.8)
    found = calibrate([seen(config, true)])
    assert found.factor == pytest.approx(0.8, rel=0.02)
    values = found.values(ASSUMED.efficiency)
    assert [values[name] for name in COMPUTING if name in values] == pytest.approx(
        [getattr(true.efficiency, name) for name in COMPUTING if name in values], rel=0.02
    )
    for other in (SHORT, LONG, SPREAD, STAGES):
        assert off(seen(other, true), found) == pytest.approx(0, abs=0.02)


def test_the_median_counts_and_one_run_that_went_wrong_does_not_decide():
    runs = [seen(SHORT, ASSUMED, times) for times in (1.19, 1.2, 1.21, 4.0, 1.2)]
    assert off(runs[1], calibrate(runs)) == pytest.approx(0, abs=0.005)


def test_what_no_run_depends_on_stays_as_it_was_assumed():
    found = calibrate([seen(SHORT, ASSUMED, 1.5)])
    assert "matmul_fp8" not in found.values(ASSUMED.efficiency)
    assert found.on(ASSUMED).efficiency.matmul_fp8 == ASSUMED.efficiency.matmul_fp8
    assert found.on(ASSUMED).efficiency.inter_host == ASSUMED.efficiency.inter_host


def test_a_run_that_is_a_thousand_times_off_has_the_farthest_factor():
    assert calibrate([seen(SHORT, ASSUMED, 1e6)]).factor == pytest.approx(1e-3, rel=0.01)
