"""Steps of the native engine in one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from threading import Timer
from unittest.mock import patch

import numpy as np
import pytest
import torch

from nanoscale.backends import gradients
from nanoscale.backends.gradients import fill
from nanoscale.backends.native import NativeEngine
from nanoscale.backends.optimizer import BUILDERS
from nanoscale.checkpoint.staging import Staging
from nanoscale.config.optimizers import AVERAGE
from nanoscale.config.schema import Optimizer
from nanoscale.data.batch import Batch
from tests.support.jobs import SHAPE, make_config

CPU = torch.device("cpu")


def micro_batches() -> list[Batch]:
    rows = np.random.default_rng(5).integers(0, SHAPE.vocab, (4, 2, 25))
    return [Batch.of_rows(each) for each in rows]


def test_qk_clip_scales_both_copies_of_schedule_free(tmp_path: Path) -> None:
    """The next weights are computed from the weights and their average."""
    optimizer = Optimizer("schedule-free", lr=1e-2)
    copies = []
    for limit in (None, 0.05):
        config = make_config(tmp_path, optimizer=replace(optimizer, qk_clip=limit))
        engine = NativeEngine(config, CPU)
        engine.train_step(micro_batches(), 1e-2)
        weights = dict(engine.parameters())["layers.0.attention.wq.weight"]
        copies.append((weights.detach(), engine.optimizer.state[weights][AVERAGE]))
    of_weights, of_average = (clipped / plain for plain, clipped in zip(*copies, strict=True))
    assert of_weights.max() < 0.9
    torch.testing.assert_close(of_average, of_weights)


def test_a_checkpoint_in_progress_has_no_averages_after_a_skipped_step(tmp_path: Path) -> None:
    optimizer = Optimizer(lr=1e-2, ema_decay=0.9)
    engine = NativeEngine(make_config(tmp_path, precision="fp16", optimizer=optimizer), CPU)
    staging = Staging()
    engine.before_update(staging.hold)
    for _ in range(2):
        engine.train_step(micro_batches(), 1e-2)
    trained = {name: value.clone() for name, value in engine.state().items()}
    staged = staging.copy(engine.state())
    assert engine.scaling is not None
    with patch.object(engine.scaling, "update", return_value=False):
        assert engine.train_step(micro_batches(), 1e-2).skipped
    thread = Timer(0.05, staging.fill)
    thread.start()
    with engine.averaged():
        thread.join()
    assert [name for name, value in trained.items() if not torch.equal(value, staged[name])] == []


def test_a_state_of_none_is_no_tensor_of_replicas(tmp_path: Path) -> None:
    engine = NativeEngine(make_config(tmp_path, optimizer=Optimizer("sgd", lr=1e-2)), CPU)
    for _, parameter in engine.parameters():
        engine.optimizer.state[parameter]["momentum_buffer"] = None
    assert all(len(tensors) == 1 for _, _, tensors in engine.replicated())


@pytest.mark.parametrize("name", BUILDERS)
def test_a_step_with_gradients_that_are_not_finite_changes_nothing(
    tmp_path: Path, name: str
) -> None:
    """Weights, moments, averages, counters and biases of experts; the next step is the one without it."""
    average = 0.9 if name in ("adamw", "lion") else None
    optimizer = Optimizer(name, lr=1e-2, momentum=0.9, ema_decay=average, qk_clip=0.01)  # type: ignore[arg-type]
    config = make_config(tmp_path, optimizer=optimizer, model=replace(SHAPE, experts=4))
    spoiled, plain = NativeEngine(config, CPU), NativeEngine(config, CPU)

    def spoil(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        grads = fill(parameters)
        grads[1].view(-1)[0] = float("inf")
        return grads

    for step in range(3):
        with patch.object(gradients, "fill", spoil):
            before = {key: copied(value) for key, value in spoiled.state().items()}
            assert not spoiled.train_step(micro_batches(), 1e-2).grad_norm.isfinite()
            for key, value in spoiled.state().items() if step else ():
                assert torch.equal(copied(value), before[key]), key
        results = [engine.train_step(micro_batches(), 1e-2) for engine in (spoiled, plain)]
        assert torch.equal(results[0].loss_sum, results[1].loss_sum)
    for (
        key,
        value,
    ) in plain.state().items():  # also averages, which begin after the first skipped step
        assert torch.equal(copied(value), copied(spoiled.state()[key])), key
    assert spoiled.figures()["skipped_steps"] == 3 and "skipped_steps" not in plain.figures()


def copied(value: torch.Tensor) -> torch.Tensor:
    return value.local.clone() if hasattr(value, "local") else value.detach().clone()
