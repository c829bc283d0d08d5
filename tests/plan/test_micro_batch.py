"""`train.micro_batch=auto`: the largest micro batch that fits."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from nanoscale.cli.main import run as nanoscale
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.schema import Zero
from nanoscale.plan import predict as predictions
from nanoscale.plan.predict import SURE, predict, with_fitting_micro_batch
from tests.plan.machines import job, machine


def sized(config: ResolvedConfig, micro_batch: int) -> ResolvedConfig:
    return replace(config, train=replace(config.train, micro_batch=micro_batch))


@pytest.mark.parametrize(
    "keys",
    [
        {"dp": 8, "zero": Zero(stage=3)},
        {"dp": 2, "tp": 4, "zero": Zero(stage=1)},
        {"dp": 2, "pp": 4, "schedule": "1f1b", "zero": Zero(stage=1), "seq_len": 2048},
        {
            "dp": 2,
            "pp": 4,
            "schedule": "zero-bubble",
            "virtual_stages": 2,
            "zero": Zero(stage=1),
            "seq_len": 512,
        },
    ],
)
def test_it_is_the_largest_that_surely_fits(keys) -> None:
    job_of_one = job(global_batch=512, **keys)
    busy = 512 // keys["dp"] // keys.get("pp", 1)
    chosen = with_fitting_micro_batch(sized(job_of_one, busy), machine()).train.micro_batch
    assert 1 <= chosen < busy
    assert predict(sized(job_of_one, chosen)).fits_probability >= SURE
    assert predict(sized(job_of_one, 2 * chosen)).fits_probability < SURE


def test_what_fits_at_once_is_not_divided() -> None:
    config = job("llama-1b", seq_len=512, zero=Zero(stage=3), micro_batch=2)
    assert with_fitting_micro_batch(config, machine()) == config


def test_it_is_the_smallest_if_none_surely_fits() -> None:
    config = job("llama-70b", zero=Zero(stage=0), micro_batch=2)
    assert with_fitting_micro_batch(config, machine()).train.micro_batch == 1


def test_a_plan_of_an_open_micro_batch_fits(capsys: pytest.CaptureFixture[str]) -> None:
    layout = ["parallel=dp", "zero=stage3"]
    words = ["recipe=llama-8b", "cluster=h100-sxm", *layout, "train.micro_batch=auto"]
    assert nanoscale(["plan", "--json", *words]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["fits_probability"] >= SURE
    assert nanoscale(["plan", "--json", *words[:-1], "train.micro_batch=64"]) == 3
    assert json.loads(capsys.readouterr().out)["fits_probability"] < SURE


@pytest.mark.parametrize("keys", [{}, {"dp": 2, "pp": 4, "schedule": "1f1b"}])
def test_a_very_large_batch_is_planned_without_a_loop_over_it(keys, monkeypatch) -> None:
    config = job("gpt2", seq_len=1024, global_batch=10**6, **keys)
    few = job("gpt2", seq_len=1024, global_batch=8192 * 2, **keys)
    exact = predict(few).time.tokens_per_s_per_gpu
    monkeypatch.setattr(predictions, "simulate_schedule", None)
    assert with_fitting_micro_batch(config, machine()).train.micro_batch == 1
    assert predict(config).time.tokens_per_s_per_gpu == pytest.approx(exact, rel=0.02)
