"""Efficiencies are found again from steps of machines that are known to have them."""

from __future__ import annotations

import pytest

from nanoscale.config.schema import Zero
from nanoscale.plan.calibration import KNOBS, Observation, calibrate, predicted
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


def test_one_run_gives_one_factor_for_all_computing():
    assumed = ASSUMED.efficiency
    slower = {name: 0.8 * getattr(assumed, name) for name in ("matmul", "attention", "memory")}
    true = changed(ASSUMED, **slower)
    found = calibrate([seen(SHORT, true)])
    assert found.factors.keys() == {"computing"}
    assert found.values(ASSUMED.efficiency) == pytest.approx(slower, rel=0.01)
    assert off(seen(LONG, true), found) == pytest.approx(0, abs=0.01)


def test_runs_of_several_shapes_tell_efficiencies_apart():
    true = changed(ASSUMED, matmul=0.5, attention=0.42, memory=0.6)
    found = calibrate([seen(config, true) for config in (SHORT, LONG, NARROW)])
    assert len(found.factors) == 3
    values = found.values(ASSUMED.efficiency)
    assert values["matmul"] == pytest.approx(0.5, rel=0.03)
    assert values["attention"] == pytest.approx(0.42, rel=0.03)
    assert values["memory"] == pytest.approx(0.6, rel=0.05)
    assert off(seen(STAGES, true), found) == pytest.approx(0, abs=0.02)


def test_a_slow_network_is_not_taken_for_slow_computing():
    true = changed(ASSUMED, inter_host=0.3, intra_host=0.26)
    found = calibrate([seen(config, true) for config in (SHORT, SPREAD)])
    values = found.values(ASSUMED.efficiency)
    assert values["inter_host"] == pytest.approx(0.3, rel=0.1)
    assert values["matmul"] == pytest.approx(ASSUMED.efficiency.matmul, rel=0.03)


def test_the_same_shape_many_times_tells_no_more_than_once():
    runs = [seen(SHORT, ASSUMED, times) for times in (1.19, 1.2, 1.21, 1.2)]
    found = calibrate(runs)
    assert found.factors.keys() == {"computing"}
    assert off(runs[1], found) == pytest.approx(0, abs=0.005)


def test_one_run_that_went_wrong_does_not_decide():
    true = changed(ASSUMED, matmul=0.5, attention=0.27, memory=0.67)
    good = [
        seen(config, true) for config in (SHORT, SHORT, SHORT, NARROW, NARROW, LONG, LONG, LONG)
    ]
    spoiled = [*good, seen(SHORT, true, 4.0)]
    kept, moved = (calibrate(runs).values(ASSUMED.efficiency) for runs in (good, spoiled))
    for name in ("matmul", "attention"):
        assert moved[name] == pytest.approx(kept[name], rel=0.1)


def test_what_no_run_depends_on_stays_as_it_was_assumed():
    found = calibrate([seen(SHORT, ASSUMED, 1.5)])
    assert {"matmul_fp8", "inter_host"} <= set(found.unused)
    assert not {"matmul_fp8", "inter_host"} & found.values(ASSUMED.efficiency).keys()
    assert found.on(ASSUMED).efficiency.matmul_fp8 == ASSUMED.efficiency.matmul_fp8


@pytest.mark.slow
def test_never_more_factors_than_runs():
    true = changed(ASSUMED, matmul=0.5, attention=0.42, memory=0.6, inter_host=0.4)
    runs = [seen(config, true) for config in (SHORT, LONG, SPREAD, NARROW, STAGES)]
    for count in range(1, len(runs) + 1):
        assert len(calibrate(runs[:count]).factors) <= count


def test_every_knob_names_efficiencies():
    for names in KNOBS.values():
        assert all(getattr(ASSUMED.efficiency, name) > 0 for name in names)
