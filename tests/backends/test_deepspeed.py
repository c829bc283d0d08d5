"""The DeepSpeed backend: the same losses as a plain loop, and one checkpoint world with the native backend."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from nanoscale.checkpoint.store import list_checkpoints
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.schema import (
    Backend,
    Checkpoint,
    Lora,
    Model,
    Optimizer,
    ParameterGroup,
    Precision,
    Zero,
)
from nanoscale.data.batch import Batch
from nanoscale.parallel import process_group
from nanoscale.train.job import make_engine
from tests.conftest import Deviations
from tests.support.jobs import (
    LONG_STEPS,
    SHAPE,
    STEPS,
    KillBefore,
    StopBefore,
    curve,
    final_weights,
    make_config,
    make_run,
    never_stopped,
    packed_data,
    resumed_at,
    train,
    write_documents,
    write_tokens,
)
from tests.support.layouts import GPT2, MOE, record_all, train_all
from tests.support.ranks import run_ranks
from tests.support.reference import CURVE, assert_equal_curves, documents_alone, plain_loop, worst
from tests.support.reference import EVERYTHING as TRAINS_ALL
from tests.support.rows import exhaustive

OFFLOAD = {"offload_optimizer": "cpu"}
EVERYTHING = {"offload_optimizer": "cpu", "offload_param": "cpu"}
STAGES = [(0, {}), (1, {}), (2, {}), (3, {}), (2, OFFLOAD), (3, EVERYTHING)]
NAMES = ["0", "1", "2", "3", "2-offload", "3-offload"]


def config_for(
    folder: Path, stage: int, zero: dict[str, Any] | None = None, steps: int = STEPS, **changes: Any
) -> ResolvedConfig:
    """Return a job of STEPS steps with accumulation and active clipping."""
    changes.setdefault("precision", "fp32")
    changes.setdefault("micro_batch", 8 // changes.get("dp", 1) // 2)
    config = make_config(folder, stage=stage, **changes)
    return replace(
        config,
        backend=Backend(name="deepspeed"),
        zero=Zero(stage=stage, **(zero or {})),  # type: ignore[arg-type]
        train=replace(config.train, steps=steps),
    )


def native_config(folder: Path, steps: int = STEPS, **changes: Any) -> ResolvedConfig:
    """Return the same job on the native backend."""
    config = make_config(folder, **changes)
    return replace(config, train=replace(config.train, steps=steps))


def loop(shape: Model = SHAPE, lora: Lora = TRAINS_ALL, steps: int = STEPS) -> CURVE:
    return plain_loop("fp32", shape=shape, lora=lora, steps=steps)


def shared_out(dp: int, number: int) -> Any:
    """Return a row: stages on two ranks that no other test has there; the others are exhaustive."""
    is_usual = dp == 2 and NAMES[number] in ("0", "3-offload")
    marks = pytest.mark.slow if is_usual else pytest.mark.exhaustive
    return pytest.param(*STAGES[number], dp, marks=marks, id=f"{NAMES[number]}-{dp}")


@pytest.mark.parametrize(
    ("stage", "zero", "dp"),
    [shared_out(dp, number) for number in range(len(STAGES)) for dp in (1, 2)],
)
def test_equals_plain_loop(
    tmp_path: Path, stage: int, zero: dict[str, Any], dp: int, deviations: Deviations
) -> None:
    write_tokens(tmp_path)
    config = config_for(tmp_path, stage, zero, LONG_STEPS, dp=dp)
    (ours,) = run_ranks(train_all, config.world_size, [config])[0]
    reference = loop(steps=LONG_STEPS)
    name = f"deepspeed, dp {dp}, stage {stage}{', offload' if zero else ''}"
    deviations(name, "fp32", worst(ours, reference))
    assert_equal_curves(ours, reference, "fp32")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_the_compiler_is_not_loaded_where_nothing_is_compiled(tmp_path: Path, stage: int) -> None:
    """It takes more than a second of every rank."""
    write_tokens(tmp_path)
    (loaded,) = run_ranks(loads_compiler, 1, config_for(tmp_path, stage))
    assert not loaded


def loads_compiler(rank: int, config: ResolvedConfig) -> bool:
    assert not compiler_is_loaded(), "what the test ranks load beforehand has it"
    train_all(rank, [config])
    return compiler_is_loaded()


def compiler_is_loaded() -> bool:
    return "torch._inductor.compile_fx" in sys.modules


LAYOUTS: list[tuple[str, int, dict[str, Any], int]] = [
    ("dp 2 · pp 2, stage 1", 1, {"dp": 2, "pp": 2}, 1),
    ("dp 2 · tp 2, stage 3", 3, {"dp": 2, "tp": 2}, 2),
    ("ulysses cp 2, stage 3", 3, {"cp": 2, "cp_method": "ulysses"}, 4),
    ("ring pp 2 · cp 2, stage 1", 1, {"cp": 2, "pp": 2}, 2),
]
OTHER_LAYOUTS: list[tuple[str, int, dict[str, Any], int]] = [
    ("pp 2 · tp 2, stage 0", 0, {"pp": 2, "tp": 2}, 2),
    ("ring cp 2 · tp 2, stage 1", 1, {"cp": 2, "tp": 2}, 4),
    ("ulysses dp 2 · cp 2, stage 2", 2, {"dp": 2, "cp": 2, "cp_method": "ulysses"}, 2),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stage", "degrees", "micro_batch"),
    [*LAYOUTS, *(exhaustive(*row) for row in OTHER_LAYOUTS)],
)
def test_layout_equals_plain_loop(
    tmp_path: Path,
    name: str,
    stage: int,
    degrees: dict[str, Any],
    micro_batch: int,
    deviations: Deviations,
) -> None:
    write_tokens(tmp_path)
    parallel = {"sequence_parallel": False} | degrees
    config = config_for(
        tmp_path, stage, dp=degrees.get("dp", 1), parallel=parallel, micro_batch=micro_batch
    )
    (ours,) = run_ranks(train_all, config.world_size, [config])[0]
    reference = loop()
    deviations(f"deepspeed, {name}", "fp32", worst(ours, reference))
    assert_equal_curves(ours, reference, "fp32")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stage", "degrees"),
    [
        ("pp 2 · dp 2", 1, {"pp": 2, "dp": 2}),
        exhaustive("ulysses cp 2", 3, {"cp": 2, "cp_method": "ulysses"}),
    ],
)
def test_packed_documents_equal_each_alone(
    tmp_path: Path, name: str, stage: int, degrees: dict[str, Any], deviations: Deviations
) -> None:
    documents = write_documents(tmp_path)
    layout = {"dp": degrees.get("dp", 1), "parallel": degrees, "micro_batch": 2}
    config = config_for(tmp_path, stage, data=packed_data(tmp_path), **layout)
    (ours,) = run_ranks(train_all, config.world_size, [config])[0]
    reference = documents_alone("fp32", SHAPE, *documents, STEPS)
    deviations(f"deepspeed, packed documents, {name}", "fp32", worst(ours, reference))
    assert_equal_curves(ours, reference, "fp32")


@pytest.mark.slow
def test_gpt2_equals_plain_loop(tmp_path: Path) -> None:
    """Tied embeddings, biases, learned positions."""
    write_tokens(tmp_path)
    divided = {"tp": 2, "sequence_parallel": False}
    config = config_for(tmp_path, 2, model=GPT2, parallel=divided, micro_batch=4)
    (ours,) = run_ranks(train_all, 2, [config])[0]
    assert_equal_curves(ours, loop(GPT2), "fp32")


ODD = replace(SHAPE, ffn=SHAPE.ffn + 1)
"""A model whose adapters have an odd number of elements, so that stage 3 pads the last shards."""
ADAPTERS = Lora(rank=3, alpha=12.0, targets=("wq", "wk", "wv", "wo", "gate", "up", "down"))
LORA = [(3, EVERYTHING, {"dp": 2}), exhaustive(1, {}, {"parallel": {"pp": 2}, "micro_batch": 2})]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "zero", "changes"), LORA)
def test_adapters_alone_equal_plain_loop(
    tmp_path: Path, stage: int, zero: dict[str, Any], changes: dict[str, Any]
) -> None:
    write_tokens(tmp_path)
    config = config_for(tmp_path, stage, zero, model=ODD, lora=ADAPTERS, **changes)
    (ours,) = run_ranks(train_all, 2, [config])[0]
    assert_equal_curves(ours, loop(ODD, ADAPTERS), "fp32")


@pytest.mark.slow
def test_lion_equals_plain_loop(tmp_path: Path) -> None:
    write_tokens(tmp_path)
    lion = Optimizer(name="lion", lr=1e-2, clip_norm=0.5)
    config = config_for(tmp_path, 2, dp=2, optimizer=lion)
    (ours,) = run_ranks(train_all, 2, [config])[0]
    reference = plain_loop("fp32", "lion")
    # A gradient near 0 rounds to another sign, and then a weight moves the other way.
    for (loss, *_), (expected, *_) in zip(ours, reference, strict=True):
        assert loss == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [exhaustive(1), 3])
def test_groups_and_the_z_loss_equal_the_native_backend(tmp_path: Path, stage: int) -> None:
    write_tokens(tmp_path)
    groups = {"mlp": ParameterGroup("*.mlp.*", lr_factor=0.3, weight_decay=0.2)}
    optimizer = Optimizer(lr=1e-2, clip_norm=0.5, groups=groups)
    config = config_for(tmp_path, stage, dp=2, optimizer=optimizer)
    config = replace(config, train=replace(config.train, z_loss=0.1))
    native = replace(config, backend=Backend())
    ours, reference = run_ranks(train_all, 2, [config, native])[0]
    assert_equal_curves(ours, reference, "fp32")


@pytest.mark.slow
def test_mixture_of_experts_equals_plain_loop(tmp_path: Path) -> None:
    write_tokens(tmp_path)
    config = config_for(tmp_path, 3, model=MOE, dp=2)
    (ours,) = run_ranks(train_all, 2, [config])[0]
    assert_equal_curves(ours, loop(MOE), "fp32")


GENTLE = Optimizer(lr=1e-3, clip_norm=0.5)
"""A rate so small that 20 steps do not memorize the 8 samples: rounding would dominate a small loss."""


NARROW = [
    *((compute, *STAGES[number], {"dp": 2}) for compute, number in (("bf16", 3), ("fp16", 1))),
    *(exhaustive(compute, *STAGES[number], {"dp": 2}) for compute, number in (("bf16", 0), ("fp16", 5))),
    ("fp16", 1, {}, {"parallel": {"pp": 2}}),
    exhaustive("bf16", 2, {}, {"parallel": {"tp": 2, "sequence_parallel": False}}),
]  # fmt: skip


@pytest.fixture(scope="module")
def gentle_losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the native backend in fp32 at the gentle rate."""
    folder = tmp_path_factory.mktemp("native")
    write_tokens(folder)
    config = native_config(folder, precision="fp32", optimizer=GENTLE)
    (curve,) = run_ranks(train_all, 1, [config])[0]
    return [loss for loss, *_ in curve]


@pytest.mark.slow
@pytest.mark.parametrize(("compute", "stage", "zero", "layout"), NARROW)
def test_narrow_precision_is_near(
    tmp_path: Path,
    gentle_losses: list[float],
    compute: str,
    stage: int,
    zero: dict[str, Any],
    layout: dict[str, Any],
) -> None:
    write_tokens(tmp_path)
    config = config_for(tmp_path, stage, zero, **layout, micro_batch=2, optimizer=GENTLE)
    narrow = Precision("fp32", compute, "fp32", loss_scale=1024.0)  # type: ignore[arg-type]
    (ours,) = run_ranks(train_all, 2, [replace(config, precision=narrow)])[0]
    losses = [loss for loss, *_ in ours]
    assert losses == pytest.approx(gentle_losses, rel=1e-2)
    assert losses != gentle_losses


FP16 = Precision("fp32", "fp16", "fp32", loss_scale=2.0**20, loss_scale_window=4)


def scales(config: ResolvedConfig) -> list[tuple[float, int]]:
    """Loss scale and skipped steps so far after every step."""
    records = run_ranks(record_all, 2, replace(config, precision=FP16))[0]
    return [(record["loss_scale"], record["skipped_steps"]) for record in records]


@pytest.mark.slow
def test_overflows_are_handled_and_counted_as_by_native(tmp_path: Path) -> None:
    write_tokens(tmp_path)
    ours = scales(config_for(tmp_path, 2, steps=LONG_STEPS, dp=2))
    assert ours[0] == (2.0**19, 1)
    assert any(later > earlier for (earlier, _), (later, _) in pairwise(ours)), "it doubles"
    assert ours == scales(native_config(tmp_path, LONG_STEPS, dp=2, stage=2))


@pytest.mark.slow
def test_overflows_in_a_pipeline(tmp_path: Path) -> None:
    write_tokens(tmp_path)
    layout = {"parallel": {"pp": 2}, "micro_batch": 2, "stage": 1}
    ours = scales(config_for(tmp_path, **layout))
    assert ours[0] == (2.0**19, 1)
    assert ours == scales(native_config(tmp_path, **layout))


def test_overflows_under_stage_0(tmp_path: Path) -> None:
    """Autocast overflows at other steps than fp16 throughout, but what follows is the same."""
    write_tokens(tmp_path)
    ours = scales(config_for(tmp_path, 0, steps=LONG_STEPS, dp=2))
    assert ours[0] == (2.0**19, 1)
    good = 0
    for (scale, skipped), (next_scale, next_skipped) in pairwise(ours):
        overflown = next_skipped == skipped + 1
        good = 0 if overflown else good + 1
        assert next_scale == scale * (0.5 if overflown else 2 if good % 4 == 0 else 1)
    assert ours[-1][1] < len(ours) - 4


ADAMW = Optimizer(lr=1e-2, clip_norm=0.5)
SGD = Optimizer(name="sgd", lr=1e-2, clip_norm=0.5)
RESUMED = [
    (3, EVERYTHING, ADAMW),
    exhaustive(3, {}, ADAMW),
    exhaustive(0, {}, SGD),
    exhaustive(2, OFFLOAD, ADAMW),
]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "zero", "optimizer"), RESUMED)
def test_stopped_and_resumed_bit_for_bit(
    tmp_path: Path, stage: int, zero: dict[str, Any], optimizer: Optimizer
) -> None:
    write_tokens(tmp_path, samples=100)
    config = config_for(tmp_path, stage, zero, dp=2, optimizer=optimizer)
    whole = never_stopped(tmp_path, config)
    run = make_run(config)
    assert train(run, config, StopBefore(3)) == ["stopped"] * 2
    assert train(run, config) == ["completed"] * 2
    assert resumed_at(run) == [3]
    assert curve(run) == curve(whole)


@pytest.mark.slow
def test_resumed_across_backends(tmp_path: Path) -> None:
    """native, deepspeed in three layouts and stages, native: the losses of a run that never stopped."""
    write_tokens(tmp_path, samples=100)
    common = {"precision": "fp32", "checkpoint": Checkpoint(keep_last=None)}
    native = native_config(tmp_path, 10, **common)
    whole = never_stopped(tmp_path, native)
    run = make_run(native)
    whole_rows = {"sequence_parallel": False}
    stations = [
        native_config(tmp_path, 10, dp=4, stage=3, **common),
        config_for(tmp_path, 2, steps=10, dp=2, **common),
        config_for(tmp_path, 3, EVERYTHING, 10, dp=2, parallel={"tp": 2} | whole_rows, **common),
        config_for(tmp_path, 1, steps=10, parallel={"pp": 2}, micro_batch=2, **common),
    ]
    for turn, station in enumerate(stations):
        train(run, station, StopBefore(2 * turn + 2, first=2 * turn + 1))  # agreed a step later
    train(run, native_config(tmp_path, 10, parallel={"tp": 2}, **common))
    assert resumed_at(run) == [2, 4, 6, 8]
    assert len(curve(run)) == 10
    for ours, reference in zip(curve(run), curve(whole), strict=True):
        assert ours["loss"] == pytest.approx(reference["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-3)
    assert final_weights(run).keys() == final_weights(whole).keys()
    assert list_checkpoints(run.checkpoints)[-1].step == 10


@pytest.mark.skipif(
    "NANOSCALE_TEST_DISK" not in os.environ,
    reason="DeepSpeed compiles an operation for it, for minutes: "
    "apt install libaio-dev && NANOSCALE_TEST_DISK=1 make test",
)
@pytest.mark.timeout(600)
def test_offload_to_a_disk_is_the_same_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.support.ranks.LIMIT_S", 500)  # the compiler takes minutes, once
    write_tokens(tmp_path, samples=100)
    disk = {"offload_optimizer": "nvme", "offload_param": "nvme", "nvme_path": str(tmp_path)}
    large = replace(SHAPE, ffn=6000)  # tensors smaller than a block of the disk stay in memory
    common = {"model": large, "optimizer": GENTLE, "checkpoint": Checkpoint(keep_last=None)}
    whole = never_stopped(tmp_path, config_for(tmp_path, 3, EVERYTHING, LONG_STEPS, dp=2, **common))
    config = config_for(tmp_path, 3, disk, LONG_STEPS, dp=2, **common)
    run = make_run(config)
    assert train(run, config, StopBefore(8)) == ["stopped"] * 2
    assert list(tmp_path.rglob("*.swp")), "something is on the disk"
    assert train(run, config) == ["completed"] * 2
    assert curve(run) == curve(whole)


def train_compiled(rank: int, config: ResolvedConfig) -> Any:
    with patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        return train_all(rank, [config])[0]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_compiled_blocks_are_the_same_training(tmp_path: Path) -> None:
    """All but written code, which tests/parallel/test_compile.py runs."""
    write_tokens(tmp_path)
    config = config_for(tmp_path, 2, dp=2)
    config = replace(config, backend=Backend(name="deepspeed", compile="on"))
    ours = run_ranks(train_compiled, 2, config)[0]
    assert_equal_curves(ours, loop(), "fp32")


@pytest.mark.slow
def test_a_second_closer_sharding_is_the_same_training(tmp_path: Path) -> None:
    """ZeRO++'s hpZ."""
    write_tokens(tmp_path)
    config = config_for(tmp_path, 3, {"hpz": 2}, dp=4)
    (ours,) = run_ranks(train_all, 4, [config])[0]
    assert_equal_curves(ours, loop(), "fp32")


CHECKPOINTING: list[Any] = [
    exhaustive(2, {"activation_checkpointing": "selective"}),
    (1, {"activation_checkpointing": "full", "pp": 2}),
    (1, {"activation_checkpointing": "full", "checkpoint_every": 2, "offload_activations": True}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "parallel"), CHECKPOINTING)
def test_activation_checkpointing_equals_plain_loop(
    tmp_path: Path, stage: int, parallel: dict[str, Any]
) -> None:
    write_tokens(tmp_path)
    pipelined = "pp" in parallel
    config = config_for(tmp_path, stage, dp=1 if pipelined else 2, parallel=parallel, micro_batch=2)
    (ours,) = run_ranks(train_all, 2, [config])[0]
    assert_equal_curves(ours, loop(), "fp32")


@pytest.mark.slow
def test_killed_and_resumed_bit_for_bit(tmp_path: Path) -> None:
    write_tokens(tmp_path, samples=100)
    saving = Checkpoint(every=3, keep_last=None)
    config = config_for(tmp_path, 2, steps=6, dp=2, checkpoint=saving)
    whole = never_stopped(tmp_path, config)
    run = make_run(config)
    with pytest.raises(RuntimeError, match="died"):
        train(run, config, KillBefore(5))
    train(run, config)
    assert resumed_at(run) == [3]
    assert curve(run) == curve(whole)


def test_evaluation_and_samples_are_as_native(tmp_path: Path) -> None:
    """The layout is a pipeline with tp, whose ranks each have a part of the model."""
    write_tokens(tmp_path)
    degrees = {"pp": 2, "tp": 2, "sequence_parallel": False}
    ours = config_for(tmp_path, 1, parallel=degrees, micro_batch=2)
    native = native_config(tmp_path, precision="fp32")
    everyone = run_ranks(evaluate_and_sample, 4, ours)
    (alone,) = run_ranks(evaluate_and_sample, 1, native)
    loss_sum, count = (sum(rank[0][i] for rank in everyone) for i in (0, 1))
    assert count == alone[0][1]
    assert loss_sum == pytest.approx(alone[0][0], rel=1e-5)
    for _, logits in everyone:
        np.testing.assert_allclose(logits, alone[1], rtol=1e-4, atol=1e-5)


def evaluate_and_sample(rank: int, config: ResolvedConfig) -> tuple[tuple[float, int], list[float]]:
    process_group.join(config.world_size, torch.device("cpu"), 120.0)
    engine = make_engine(config, torch.device("cpu"))
    rows = Batch.of_rows(np.random.default_rng(0).integers(0, 60, (2, config.train.seq_len + 1)))
    return engine.evaluate([(rows, 2), (rows, 1)]), engine.next_token_logits([5, 7, 9]).tolist()
