"""A single process in a compute dtype, compared with a loop that keeps fp32 master weights by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from nanoscale.backends.native import NativeEngine
from nanoscale.backends.optimizer import make_optimizer
from nanoscale.config.schema import Lora, Optimizer
from nanoscale.data.batch import Batch
from nanoscale.models.initialization import initialize
from nanoscale.models.transformer import Transformer
from tests.support.jobs import SEQ_LEN, SHAPE, make_config

CPU = torch.device("cpu")


def micro_batches() -> list[Batch]:
    tokens = np.random.default_rng(1).integers(0, SHAPE.vocab, (8, SEQ_LEN + 1))
    return [Batch.of_rows(tokens[i : i + 2]) for i in range(0, 8, 2)]


def test_gradients_add_up_in_masters_and_weights_follow_them(tmp_path: Path) -> None:
    config = make_config(tmp_path, precision="bf16")
    engine = NativeEngine(config, CPU)
    model = Transformer(SHAPE)
    initialize(model, SHAPE, config.train.seed)
    masters = [
        (name, torch.nn.Parameter(p.detach().clone())) for name, p in model.named_parameters()
    ]
    optimizer = make_optimizer(masters, config.optimizer)
    model.bfloat16()
    for _ in range(3):
        result = engine.train_step(micro_batches(), 1e-2)
        sums = [torch.zeros_like(master) for _, master in masters]
        for batch in micro_batches():
            inputs, targets = torch.from_numpy(batch.inputs), torch.from_numpy(batch.targets)
            loss = model(inputs, targets=targets) / (8 * SEQ_LEN)
            for total, grad in zip(
                sums, torch.autograd.grad(loss, model.parameters()), strict=True
            ):
                total += grad
        for total, (_, master) in zip(sums, masters, strict=True):
            master.grad = total
        norm = torch.nn.utils.clip_grad_norm_([m for _, m in masters], 0.5)
        assert result.grad_norm.item() == pytest.approx(norm.item(), rel=1e-5)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2
        optimizer.step()
        for (_, master), parameter in zip(masters, model.parameters(), strict=True):
            parameter.data.copy_(master)
    state = engine.state()
    for name, master in masters:
        torch.testing.assert_close(state[f"model.{name}"], master.data, rtol=0, atol=1e-6)
    (ours,) = engine.stages.values()
    assert all(p.dtype == torch.bfloat16 and p.grad is None for p in ours.parameters())


def test_frozen_weights_have_no_master(tmp_path: Path) -> None:
    config = replace(make_config(tmp_path, precision="bf16"), lora=Lora(rank=2))
    engine = NativeEngine(config, CPU)
    model = Transformer(SHAPE)
    initialize(model, SHAPE, config.train.seed)
    engine.train_step(micro_batches(), 1e-2)
    frozen = engine.frozen_state()
    assert frozen.keys() == {f"model.{name}" for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        assert torch.equal(frozen[f"model.{name}"], parameter.bfloat16()), name
    assert {master.dtype for _, master in engine.parameters()} == {torch.float32}


def test_frozen_weights_are_never_in_fp32(tmp_path: Path) -> None:
    """A rank that trains adapters alone must have room for its weights in the compute dtype, and no more."""
    config = replace(make_config(tmp_path, precision="bf16"), lora=Lora(rank=2))
    made: list[tuple[torch.device, torch.dtype]] = []
    materialize = Transformer.materialize

    def noted(model: Transformer, device: torch.device) -> None:
        materialize(model, device)
        made.extend((p.device, p.dtype) for p in model.parameters() if not p.requires_grad)

    with patch.object(Transformer, "materialize", noted):
        NativeEngine(config, CPU)
    assert set(made) == {(CPU, torch.bfloat16)}


def test_a_resumed_model_computes_with_the_loaded_weights(tmp_path: Path) -> None:
    config = make_config(tmp_path, precision="bf16")
    trained, resumed = NativeEngine(config, CPU), NativeEngine(config, CPU)
    trained.train_step(micro_batches(), 1e-2)
    state = resumed.empty_state()
    for name, value in trained.state().items():
        state[name].detach().copy_(value)
    resumed.load_state(state)
    results = [engine.train_step(micro_batches(), 1e-2) for engine in (trained, resumed)]
    assert torch.equal(results[0].loss_sum, results[1].loss_sum)
    assert torch.equal(results[0].grad_norm, results[1].grad_norm)


def test_a_skipped_step_scales_no_weights_later(tmp_path: Path) -> None:
    """Scores that overflow in fp16 belong to the skipped step alone."""
    optimizer = Optimizer(lr=1e-3, qk_clip=100.0)
    engine = NativeEngine(make_config(tmp_path, precision="fp16", optimizer=optimizer), CPU)
    assert engine.qk_clip is not None and engine.scaling is not None
    with patch.object(engine.scaling, "update", return_value=False):
        engine.qk_clip._largest.fill_(torch.inf)
        assert engine.train_step(micro_batches(), 1e-3).skipped
    before = [parameter.detach().clone() for _, parameter in engine.parameters()]
    engine.train_step(micro_batches(), 0.0)
    for old, (name, new) in zip(before, engine.parameters(), strict=True):
        assert torch.equal(old, new), name
