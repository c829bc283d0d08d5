"""A loss that is not finite: the error names the first module and pass that made it so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nanoscale.backends.base import StepResult
from nanoscale.backends.native import NativeEngine
from nanoscale.common.errors import LostPeerError
from nanoscale.config.schema import Checkpoint
from nanoscale.data.batch import Batch
from nanoscale.models.attention import CausalAttention
from nanoscale.models.transformer import SwiGLU
from nanoscale.runs import events
from nanoscale.runs.failure import Evidence, RankFailure, diagnose
from nanoscale.runs.position import NOW
from nanoscale.runs.rank_context import StopFlag
from tests.support.jobs import SHAPE, make_config, make_run, train_rank, write_tokens
from tests.support.layouts import SHARED
from tests.support.ranks import run_ranks

FAILS = 5


class _NoGradient(torch.autograd.Function):
    """Its gradient is infinite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / 0


def train_failing(
    rank: int, path: Path, where: str, call: int = 4, only: int | None = None, once: bool = False
) -> str:
    """Train; in step FAILS a block's result, or the gradient of its attention, is not finite.

    Args:
        call: its number in the step; 4 is of the second micro batch, in two blocks.
        only: the rank on which it is so; None: all.
        once: True if it is finite when the step is repeated.
    """
    plain_mlp, plain_core = SwiGLU.forward, CausalAttention.forward
    calls = {"mlp": 0, "core": 0}
    planted: list[str] = []

    def is_bad(kind: str) -> bool:
        calls[kind] = calls[kind] + 1 if NOW.step == FAILS else 0
        bad = where == kind and calls[kind] == call and only in (None, rank)
        bad &= not (once and planted)
        planted.extend([kind] * bad)
        return bad

    def mlp(self: SwiGLU, hidden: Tensor) -> Tensor:
        result = plain_mlp(self, hidden)
        return result / 0 if is_bad("mlp") else result

    def core(self: CausalAttention, q: Tensor, *others: Any) -> Tensor:
        return plain_core(self, _NoGradient.apply(q) if is_bad("core") else q, *others)

    SwiGLU.forward, CausalAttention.forward = mlp, core  # type: ignore[method-assign, assignment]
    try:
        return train_rank(rank, path, StopFlag())
    except (ArithmeticError, LostPeerError) as error:
        return str(error)


@pytest.mark.parametrize(
    ("where", "layout", "every"),
    [
        ("mlp", {}, 3),
        ("core", {}, 0),
        ("mlp", {"dp": 2, "stage": 3}, 0),
        ("core", {"dp": 2, "stage": 1}, 3),
    ],
    ids=str,
)
def test_the_first_cause_is_named(
    tmp_path: Path, where: str, layout: dict[str, Any], every: int
) -> None:
    write_tokens(tmp_path, samples=100)
    checkpoint = Checkpoint(every=every, at_end=False)
    config = make_config(tmp_path, steps=6, checkpoint=checkpoint, micro_batch=2, **layout)
    run = make_run(config)
    texts = run_ranks(train_failing, config.world_size, run.path, where)
    named = {
        "mlp": "the result of `layers.1.mlp` (SwiGLU), in micro batch 2 of step 5",
        "core": "the gradient of the result of `layers.1.attention",
    }[where]
    for text in texts:
        assert text.startswith(f"the first of its causes is {named}"), text
        assert "at step 5; try" in text
    (event,) = [event for event in events.read(run) if event["kind"] == "repeat"]
    assert event["message"].startswith(f"step {4 if every else 1} to 5 once more")


@pytest.mark.parametrize(
    ("layout", "where", "call", "rank", "once", "named"),
    [
        ({"dp": 2}, "mlp", 2, 1, False, "the result of `layers.1.mlp` (SwiGLU)"),
        ({"dp": 2}, "mlp", 2, 1, True, "loss is nan at step 5; the loss is not finite on rank 1; "),
        # A block with experts runs its shared block once for each half of a micro batch.
        (
            {"dp": 2, "stage": 3, "model": SHARED, "parallel": {"ep": 2}},
            *("mlp", 8, 1, False),
            "the result of `layers.1.mlp.shared` (SwiGLU), in micro batch 2 of step 5",
        ),
        # As text, `layers.10` on the next stage comes before `layers.9`.
        (
            {
                "model": replace(SHAPE, layers=11, hidden=16, heads=2, kv_heads=2),
                "parallel": {"pp": 2, "layers_per_stage": [10, 1]},
            },
            *("mlp", 20, 0, False, "the result of `layers.9.mlp` (SwiGLU)"),
        ),
    ],
)
def test_the_rank_is_named_and_the_others_say_that_they_lost_it(
    tmp_path: Path, layout: dict[str, Any], where: str, call: int, rank: int, once: bool, named: str
) -> None:
    write_tokens(tmp_path, samples=100)
    checkpoint = Checkpoint(every=3, at_end=False)
    config = make_config(tmp_path, steps=6, checkpoint=checkpoint, micro_batch=2, **layout)
    texts = run_ranks(train_failing, 2, make_run(config).path, where, call, rank, once)
    text = texts.pop(rank)
    assert texts == [f"a peer was lost: {text}"]
    assert named in text and f" on rank {rank}" in text and ("optimizer.lr" in text) != once
    lost = RankFailure("raised", rank, rank, "h", 0.0, "x.NonFiniteError", text)
    diagnosis, remedy = diagnose(lost, Evidence())
    assert ("a device or its memory has made an error" in diagnosis) == once
    assert ("optimizer.lr" in remedy) != once


def train_damaged(rank: int, path: Path) -> str:
    """Train; the update of step 3 makes a weight infinite."""
    plain = NativeEngine.train_step

    def train_step(self: NativeEngine, batches: list[Batch], lr: float, **how: Any) -> StepResult:
        result = plain(self, batches, lr, **how)
        if NOW.step == 3:
            dict(self.parameters())["layers.0.mlp.up.weight"].data[0, 0] = torch.inf
        return result

    NativeEngine.train_step = train_step  # type: ignore[method-assign]
    return train_failing(rank, path, "")


def test_weights_that_an_update_has_damaged_are_named(tmp_path: Path) -> None:
    write_tokens(tmp_path, samples=100)
    run = make_run(make_config(tmp_path))
    (text,) = run_ranks(train_damaged, 1, run.path)
    assert text.startswith(
        "`layers.0.mlp.up.weight` was not finite before step 4: the update of step 3"
    )
