"""The engine's memory on a GPU, counted by a rehearsal, compared with the plan's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch

from nanoscale.backends import gradients
from nanoscale.backends.native import NativeEngine
from nanoscale.checkpoint.staging import Staging
from nanoscale.config.composing.compose import compose
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.launch.request import check_request
from nanoscale.plan.hardware.planned_devices import planned_devices
from nanoscale.plan.predict import predict
from nanoscale.rehearse.life import build, world_of
from nanoscale.rehearse.played.cuda import Gpu
from nanoscale.rehearse.played.record import RankRecord
from nanoscale.rehearse.played.world import World
from nanoscale.rehearse.rehearsed_job import EqualSamples
from tests.support.ranks import run_ranks
from tests.support.rows import exhaustive

SHAPE = (
    "layers=2 hidden=1024 heads=16 kv_heads=4 head_dim=64 ffn=2816 vocab=32000 tie_embeddings=false"
)
JOB = [
    "model=llama-1b",
    *(f"model.{size}" for size in SHAPE.split()),
    "cluster=h200",
    "cluster.hosts=1",
    "precision=bf16",
    "backend.compile=off",
    "train.steps=2",
    "train.micro_batch=1",
    "train.seq_len=2048",
]
ONE, EIGHT = 1e-3, 1e-2
"""The largest relative error of the plan: on one GPU, on eight."""
ROWS = [
    ("parallel.dp=1 train.global_batch=2", ONE),
    ("parallel.dp=1 train.global_batch=2 optimizer=adamw8bit", ONE),
    ("parallel.dp=8 train.global_batch=8 zero=stage0", EIGHT),
    ("parallel.dp=8 train.global_batch=16 zero=stage1", EIGHT),
    ("parallel.dp=8 train.global_batch=16 zero=stage2", EIGHT),
    ("parallel.dp=8 train.global_batch=16 zero=stage2 model.tie_embeddings=true", EIGHT),
    ("parallel.dp=8 train.global_batch=16 zero=stage3 parallel.activation_checkpointing=full", EIGHT),
    ("parallel.dp=8 train.global_batch=16 zero=stage3 parallel.dp_replicate=2", EIGHT),
    ("parallel.dp=8 train.global_batch=16 zero=stage3 model.tie_embeddings=true", EIGHT),
    ("parallel.dp=8 train.global_batch=16 zero=stage3 train.seq_len=256", EIGHT),
    ("parallel.dp=8 train.global_batch=16 zero=stage2 precision=fp8", EIGHT),
    ("parallel.tp=4 train.global_batch=2", EIGHT),
    ("parallel.cp=4 parallel.dp=2 train.global_batch=4 zero=stage3", EIGHT),
    ("parallel.cp=4 parallel.dp=2 train.global_batch=4 zero=stage3 parallel.cp_method=ulysses", EIGHT),
]  # fmt: skip
USUAL = (
    "parallel.dp=1 train.global_batch=2",
    "parallel.dp=8 train.global_batch=16 zero=stage3 parallel.activation_checkpointing=full",
    "parallel.tp=4 train.global_batch=2",
)


def job(overrides: str) -> ResolvedConfig:
    composed = compose([*JOB, *overrides.split()])
    return check_request(composed, devices=planned_devices(composed)).config


H200 = Gpu("NVIDIA H200", 141 * 10**9, 8)
T = TypeVar("T")


def with_engine(config: ResolvedConfig, act: Callable[[Any, World], T]) -> T:
    """Take two steps on rank 0 of a job, and return what `act` makes of its engine and its GPU.

    `gpu.peak` is then the peak of the last step, in bytes.
    """
    with world_of(config, RankRecord(0), H200) as gpu:
        engine = build(config, gpu)
        for _ in range(2):
            gpu.reset_peak()
            engine.train_step(EqualSamples(config).batches, 1e-4)
        return act(engine, gpu)


def peak(_: int, layout: str) -> int:
    """Return the bytes of a layout; in a process of its own, since parts of PyTorch are replaced."""
    return with_engine(job(layout), lambda _, gpu: gpu.peak)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "bound"),
    [
        pytest.param(*row, id=row[0]) if row[0] in USUAL else exhaustive(*row, name=row[0])
        for row in ROWS
    ],
)
def test_the_plan_knows_what_the_engine_takes(layout: str, bound: float) -> None:
    planned = predict(job(layout)).memory[0].allocated
    (measured,) = run_ranks(peak, 1, layout)
    assert planned / measured == pytest.approx(1, abs=bound)


def checkpointed(_: int, layout: str) -> dict[str, int]:
    """Return the bytes on the GPU before and during a copy for a checkpoint, and in host memory after it."""

    def act(engine: NativeEngine, gpu: World) -> dict[str, int]:
        gpu.reset_peak()
        before = gpu.live
        staging = Staging()
        staging.copy(engine.state())
        return {"before": before, "during": gpu.peak, "host": staging._buffer.nbytes}

    return with_engine(job(layout), act)


@pytest.mark.slow
def test_a_checkpoint_of_8_bit_moments_takes_nothing_of_the_gpu() -> None:
    """Nor more host memory than the state has: pinned memory of PyTorch would be powers of two."""
    layout = "parallel.dp=1 train.global_batch=2 optimizer=adamw8bit"
    (found,) = run_ranks(checkpointed, 1, layout)
    assert found["during"] == found["before"]
    numel = sum(p.numel() for p in _parameters(layout))
    assert found["host"] == pytest.approx(numel * (4 + 2 * (1 + 4 / 256)), rel=1e-3)


def passes(_: int) -> int:
    """Return how often gradients are clipped in a pass of their own."""
    clipped: list[object] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradients, "clip", lambda *given: clipped.append(given))
        with_engine(job("parallel.dp=1 train.global_batch=2"), lambda *_: None)
    return len(clipped)


def test_a_gpu_clips_in_the_update() -> None:
    assert run_ranks(passes, 1) == [0]


def _parameters(layout: str) -> list[torch.nn.Parameter]:
    from nanoscale.models.transformer import Transformer

    with torch.device("meta"):
        return list(Transformer(job(layout).model).parameters())
