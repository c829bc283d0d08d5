"""Law 1, along the whole job: every data-parallel layout trains the same model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from nanoscale.backends import muon
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.schema import Checkpoint, Lora, Model, Optimizer, ParameterGroup
from nanoscale.runs.rank_context import StopFlag
from tests.support.jobs import (
    LONG_STEPS,
    SHAPE,
    final_weights,
    make_config,
    make_run,
    read_metrics,
    train,
    train_rank,
    write_tokens,
)
from tests.support.layouts import MLA
from tests.support.ranks import run_ranks
from tests.support.reference import CURVE, assert_equal_curves, plain_loop, worst
from tests.support.rows import exhaustive

LAYOUTS = [(2, 1, 1), (2, 2, 1), (2, 3, 1)]
"""Layouts that the equivalence matrix does not have: dp, ZeRO stage, dp_replicate."""


def our_curve(config: ResolvedConfig) -> CURVE:
    run = make_run(config)
    assert train(run, config) == ["completed"] * config.world_size
    names = ("loss", "grad_norm", "lr", "tokens")
    return [tuple(record[name] for name in names) for record in read_metrics(run)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dp", "stage", "dp_replicate", "precision"),
    [(*layout, "fp64") for layout in LAYOUTS]
    + [exhaustive(4, 1, 2, "fp64")]
    + [exhaustive(*layout, "fp32") for layout in LAYOUTS],
)
def test_layout_equals_plain_loop(
    tmp_path: Path, dp: int, stage: int, dp_replicate: int, precision: str
) -> None:
    write_tokens(tmp_path)
    config = make_config(
        tmp_path, dp=dp, stage=stage, dp_replicate=dp_replicate, precision=precision
    )
    config = replace(config, train=replace(config.train, steps=LONG_STEPS))
    reference = plain_loop(precision, steps=LONG_STEPS)
    assert any(norm > 0.5 for _, norm, *_ in reference), "clipping must be active"
    assert any(norm < 0.5 for _, norm, *_ in reference), "and not always"
    assert_equal_curves(our_curve(config), reference, precision)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "degrees", "stage"),
    [
        ("sgd", {"dp": 2}, 3),
        ("lion", {"dp": 2}, 3),
        ("schedule-free", {"dp": 2}, 3),
        ("adafactor", {"dp": 2, "tp": 2}, 3),
        exhaustive("adafactor", {"dp": 4, "dp_replicate": 2}, 2),
        ("muon", {"dp": 2}, 0),
        exhaustive("muon", {"tp": 2, "pp": 2}, 1),
        ("muon", {"dp": 2, "tp": 2}, 2),
        exhaustive("muon", {"dp": 4, "dp_replicate": 2}, 2),
    ],
)
def test_other_optimizers_equal_plain_loop(
    tmp_path: Path, name: str, degrees: dict[str, int], stage: int
) -> None:
    write_tokens(tmp_path)
    config = make_config(
        tmp_path,
        dp=degrees.get("dp", 1),
        stage=stage,
        parallel=degrees,
        optimizer=Optimizer(name=name, lr=1e-2, clip_norm=0.5),  # type: ignore[arg-type]
    )
    assert_equal_curves(our_curve(config), plain_loop("fp64", name), "fp64")


@pytest.mark.slow
@pytest.mark.parametrize("mode", [exhaustive("none"), "full"])
def test_blocks_that_are_gathered_ahead(tmp_path: Path, mode: str) -> None:
    write_tokens(tmp_path)
    parallel = {"activation_checkpointing": mode}
    config = make_config(tmp_path, dp=2, stage=3, parallel=parallel)
    config = replace(config, zero=replace(config.zero, prefetch=2))
    assert_equal_curves(our_curve(config), plain_loop("fp64"), "fp64")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "degrees", "stage"),
    [
        exhaustive(SHAPE, {"tp": 2, "pp": 2, "activation_checkpointing": "full"}, 1),
        (MLA, {"dp": 2, "tp": 2}, 2),
    ],
    ids=str,
)
def test_large_attention_scores_are_clipped(
    tmp_path: Path, shape: Model, degrees: dict[str, Any], stage: int
) -> None:
    """A limit that is exceeded in every step; the logged score is the largest one of all heads."""
    write_tokens(tmp_path)
    config = make_config(
        tmp_path,
        dp=degrees.get("dp", 1),
        stage=stage,
        parallel=degrees,
        model=shape,
        optimizer=Optimizer(lr=1e-2, clip_norm=0.5, qk_clip=0.05),
    )
    ours = our_curve(config)
    assert_equal_curves(ours, plain_loop("fp64", shape=shape, qk_clip=0.05), "fp64")
    assert worst(ours, plain_loop("fp64", shape=shape))[0] > 1e-6, "the limit has an effect"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("degrees", "stage"), [({"dp": 2}, 2), exhaustive({"tp": 2, "pp": 2}, 1)], ids=str
)
def test_states_in_bf16_are_near_those_in_fp32(
    tmp_path: Path, degrees: dict[str, Any], stage: int
) -> None:
    """Products in bf16 alone come within 0.002 at this learning rate."""
    optimizer = Optimizer(lr=1e-3, clip_norm=0.5)
    narrow = replace(optimizer, moments_dtype="bf16")
    curves: list[CURVE] = []
    for changes in (
        {"precision": "fp32", "optimizer": optimizer},
        {"precision": "fp32", "optimizer": narrow},
        {"precision": "bf16-pure", "optimizer": optimizer},
    ):
        folder = tmp_path / f"{len(curves)}"
        folder.mkdir()
        write_tokens(folder)
        layout = {"dp": degrees.get("dp", 1), "stage": stage, "parallel": degrees}
        curves.append(our_curve(make_config(folder, **changes, **(layout if curves else {}))))
    wide, moments, pure = ([loss for loss, *_ in curve] for curve in curves)
    assert moments == pytest.approx(wide, rel=2e-4)
    assert pure == pytest.approx(wide, rel=5e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("degrees", "stage"), [exhaustive({"tp": 2, "pp": 2}, 1), ({"dp": 2, "cp": 2}, 2)]
)
def test_the_z_loss_equals_the_plain_loop(
    tmp_path: Path, degrees: dict[str, int], stage: int
) -> None:
    write_tokens(tmp_path)
    config = make_config(tmp_path, dp=degrees.get("dp", 1), stage=stage, parallel=degrees)
    config = replace(config, train=replace(config.train, z_loss=0.1))
    reference = plain_loop("fp64", z_loss=0.1)
    assert reference != plain_loop("fp64")
    assert_equal_curves(our_curve(config), reference, "fp64")


def train_exchanging(rank: int, path: Path, at_once: int) -> tuple[list[int], list[str]]:
    """Train with at most `at_once` elements of several matrices; return the elements that this rank received in
    exchanges, and when it sent and waited."""
    received, calls = list[int](), list[str]()
    exchange = dist.all_to_all_single

    def recorded(output: Tensor, *args: Any, **options: Any) -> Any:
        received.append(output.numel())
        calls.append("send")
        work = exchange(output, *args, **options)
        return SimpleNamespace(wait=lambda: (calls.append("wait"), work.wait()))

    dist.all_to_all_single = recorded
    muon.MUON_AT_ONCE = at_once  # type: ignore[attr-defined]
    assert train_rank(rank, path, StopFlag()) == "completed"
    return received, calls


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [{"dp": 2, "stage": 3}, exhaustive({"parallel": {"tp": 2, "pp": 2}, "stage": 1})]
)
def test_matrices_are_exchanged_some_at_a_time_and_updates_stay_equal(
    tmp_path: Path, layout: dict[str, Any]
) -> None:
    write_tokens(tmp_path)
    largest, weights = [], []
    for name, at_once in (("whole", 1 << 27), ("some", SHAPE.hidden * SHAPE.ffn)):
        config = make_config(
            tmp_path,
            precision="fp32",
            optimizer=Optimizer(name="muon", lr=1e-2, clip_norm=0.5),
            checkpoint=Checkpoint(at_end=True),
            **layout,
        )
        run = make_run(config, name)
        ranks = run_ranks(train_exchanging, config.world_size, run.path, at_once)
        largest.append(max(max(received) for received, _ in ranks))
        weights.append(final_weights(run))
    assert largest[1] <= SHAPE.hidden * SHAPE.ffn < largest[0]
    # The second exchange begins before the matrices of the first are orthogonalized.
    assert ranks[0][1][:5] == ["send", "send", "wait", "send", "wait"]
    whole, some = weights
    assert whole.keys() == some.keys()
    assert all(torch.equal(value, some[name]) for name, value in whole.items())


@pytest.mark.slow
def test_muon_of_adapters_is_equal_in_every_layout(tmp_path: Path) -> None:
    lora = Lora(rank=3, alpha=12.0, targets=["wq", "up", "down"])
    muon = Optimizer(name="muon", lr=1e-2, clip_norm=0.5)
    curves: list[CURVE] = []
    for layout in ({}, {"dp": 2, "stage": 3, "parallel": {"tp": 2}}):
        folder = tmp_path / f"{len(curves)}"
        folder.mkdir()
        write_tokens(folder)
        curves.append(our_curve(make_config(folder, lora=lora, optimizer=muon, **layout)))
    assert_equal_curves(curves[1], curves[0], "fp64")
    assert curves[0][-1][0] < curves[0][0][0]


@pytest.mark.slow
@pytest.mark.parametrize("name", [exhaustive("adamw"), "muon"])
def test_groups_of_parameters_are_equal_in_every_layout(tmp_path: Path, name: str) -> None:
    groups = {
        "norms": ParameterGroup("*norm*", weight_decay=0.2),
        "mlp": ParameterGroup("layers.*.mlp.*", lr_factor=0.3),
    }
    plain = Optimizer(name=name, lr=1e-2, clip_norm=0.5)  # type: ignore[arg-type]
    grouped = replace(plain, groups=groups)

    def curve(folder: str, optimizer: Optimizer, **layout: Any) -> CURVE:
        (tmp_path / folder).mkdir()
        write_tokens(tmp_path / folder)
        return our_curve(make_config(tmp_path / folder, optimizer=optimizer, **layout))

    alone = curve("alone", grouped)
    divided = curve("divided", grouped, dp=2, stage=3, parallel={"tp": 2})
    assert_equal_curves(divided, alone, "fp64")
    assert alone != curve("plain", plain)


@pytest.mark.slow
def test_order_of_samples_is_the_same_in_every_layout(tmp_path: Path) -> None:
    """The corpus has many global batches, with which another order would give other losses."""
    write_tokens(tmp_path, samples=100)
    curves = []
    for dp, stage in ((1, 0), (2, 3)):
        root = tmp_path / f"dp{dp}"
        config = make_config(tmp_path, dp=dp, stage=stage)
        config = replace(config, run=replace(config.run, root=str(root)))
        curves.append(our_curve(config))
    assert_equal_curves(curves[1], curves[0], "fp64")


@pytest.mark.slow
def test_bf16_follows_fp32(tmp_path: Path) -> None:
    write_tokens(tmp_path, samples=100)
    exact = our_curve(make_config(tmp_path, precision="fp32"))
    for dp, stage in ((2, 0), (2, 3)):
        config = make_config(tmp_path, dp=dp, stage=stage, precision="bf16")
        config = replace(config, run=replace(config.run, root=str(tmp_path / f"{dp}-{stage}")))
        loss, _ = worst(our_curve(config), exact)
        assert 1e-6 < loss < 0.01, "bf16 was not used, or is far off"
