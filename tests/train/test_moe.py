"""Mixtures of experts through a training: stopped, resumed elsewhere, and routed as unevenly as can be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoscale.config.schema import Config, Optimizer
from tests.support.jobs import (
    LONG_STEPS,
    KillBefore,
    StopBefore,
    assert_same_training,
    assert_same_weights,
    curve,
    final_weights,
    make_config,
    make_run,
    never_stopped,
    read_metrics,
    resumed_at,
    saving_config,
    train,
    write_tokens,
)
from tests.support.layouts import MOE, mixture, record_all, row_config
from tests.support.ranks import run_ranks
from tests.support.reference import assert_equal_curves, plain_loop
from tests.support.rows import exhaustive

EP = {"parallel": {"ep": 2}, "dp": 2}


def moe_config(folder: Path, **changes: Any) -> Config:
    return saving_config(folder, model=MOE, **changes)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_killed_and_resumed_bit_for_bit(tmp_path: Path) -> None:
    write_tokens(tmp_path, samples=100)
    config = moe_config(tmp_path, stage=3, precision="fp32", **EP)
    whole = never_stopped(tmp_path, config)
    run = make_run(config)
    with pytest.raises(RuntimeError, match="died|failed"):
        train(run, config, KillBefore(6))
    train(run, config)
    assert resumed_at(run) == [3]
    assert curve(run) == curve(whole)
    assert_same_weights(run, whole)
    balance = final_weights(run)["balance.bias.layers.1"]
    assert balance.dtype == torch.int64 and balance.any()


@pytest.mark.slow
def test_resumed_in_other_degrees(tmp_path: Path) -> None:
    """ep 4, then ep 2 · tp 2, then one process: the losses of a run that stayed in one."""
    write_tokens(tmp_path, samples=100)
    config = moe_config(tmp_path)
    whole = never_stopped(tmp_path, config)
    run = make_run(config)
    first = moe_config(tmp_path, dp=4, stage=3, parallel={"ep": 4})
    train(run, first, StopBefore(3))
    second = moe_config(tmp_path, dp=2, stage=1, parallel={"ep": 2, "tp": 2})
    train(run, second, StopBefore(6, first=4))
    train(run, config)
    assert resumed_at(run) == [3, 6]
    assert_same_training(run, whole)


@pytest.mark.slow
def test_a_rank_without_tokens(tmp_path: Path) -> None:
    """Preferences so strong that one expert takes all: the other rank has nothing to compute."""
    write_tokens(tmp_path)
    shape = replace(MOE, experts_per_token=1, balance_rate=10.0)
    config = row_config(tmp_path, mixture(3, shape=shape, dp=2, ep=2), "fp64", steps=10)
    records = run_ranks(record_all, 2, config)[0]
    assert any(record["moe_imbalance"] == shape.experts for record in records)
    ours = [tuple(record[k] for k in ("loss", "grad_norm", "lr", "tokens")) for record in records]
    assert_equal_curves(ours, plain_loop("fp64", shape=shape, steps=10), "fp64")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stage", "degrees"),
    [
        ("muon", 3, {"dp": 2, "ep": 2}),
        exhaustive("schedule-free", 3, {"dp": 2, "ep": 2}),
        exhaustive("adafactor", 3, {"dp": 4, "ep": 2}),
    ],
)
def test_other_optimizers_of_experts_equal_plain_loop(
    tmp_path: Path, name: Any, stage: int, degrees: dict[str, int]
) -> None:
    write_tokens(tmp_path)
    chosen = Optimizer(name=name, lr=1e-2, clip_norm=0.5)
    dp = degrees.get("dp", 1)
    config = make_config(
        tmp_path,
        dp=dp,
        stage=stage,
        precision="fp64",
        model=MOE,
        parallel=degrees,
        optimizer=chosen,
    )
    records = run_ranks(record_all, dp, config)[0]
    ours = [tuple(record[k] for k in ("loss", "grad_norm", "lr", "tokens")) for record in records]
    assert_equal_curves(ours, plain_loop("fp64", name, shape=MOE), "fp64")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", exhaustive("fp16")])
def test_narrow_precision_is_near(tmp_path: Path, precision: str) -> None:
    write_tokens(tmp_path)
    narrow = make_config(
        tmp_path, dp=2, stage=2, precision=precision, model=MOE, parallel={"ep": 2}
    )
    curves = [run_ranks(record_all, 2, config)[0] for config in (narrow, in_fp32(narrow))]
    for ours, reference in list(zip(*curves, strict=True))[:5]:  # later other experts are chosen
        assert ours["loss"] == pytest.approx(reference["loss"], rel=2e-2)


def in_fp32(config: Config) -> Config:
    return replace(config, precision=make_config(Path(), precision="fp32").precision)


@pytest.mark.slow
def test_balancing_evens_the_loads_out(tmp_path: Path) -> None:
    write_tokens(tmp_path)
    imbalance = {}
    for balance in ("none", "bias"):
        shape = replace(MOE, balance=balance)
        config = make_config(tmp_path, steps=LONG_STEPS, precision="fp32", model=shape)
        run = make_run(config, balance)
        train(run, config)
        last = [record["moe_imbalance"] for record in read_metrics(run)[-5:]]
        imbalance[balance] = sum(last) / len(last)
    assert imbalance["bias"] < imbalance["none"]
