"""Distillation: the same losses as a plain loop with a transformers teacher in every layout, exact resumes."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.schema import Backend
from nanoscale.models import head
from nanoscale.models.distillation import Distillation
from nanoscale.runs.directory import RunDirectory
from tests.support import hf_models, reference
from tests.support.jobs import (
    SEQ_LEN,
    SHAPE,
    STEPS,
    ZBV,
    StopBefore,
    assert_same_training,
    assert_same_weights,
    curve,
    make_config,
    make_run,
    packed_data,
    resumed_at,
    saving_config,
    train,
    write_documents,
    write_tokens,
)
from tests.support.rows import exhaustive

K, WEIGHT = 5, 0.7


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    hf_models.save("gpt2", tmp_path / "teacher", initializer_range=0.2)
    return tmp_path / "teacher"


def distilled(
    config: ResolvedConfig, teacher: Path, temperature: float = 2.0, **more: Any
) -> ResolvedConfig:
    keys = {"objective": "distill", "teacher": str(teacher), "distill_top_k": K} | more
    keys |= {"distill_weight": WEIGHT, "distill_temperature": temperature}
    return replace(config, train=replace(config.train, **keys), data=packed_data(teacher.parent))


@cache
def plain_loop(folder: Path, temperature: float, packed: bool = True) -> reference.CURVE:
    """Train on documents that go through teacher and student alone, with probabilities as in the paper."""
    from transformers import AutoModelForCausalLM

    documents, answers = write_documents(folder.parent)
    if not packed:
        stream = write_tokens(folder.parent)
        documents = [stream[at : at + SEQ_LEN + 1] for at in range(0, len(stream) - 1, SEQ_LEN)]
        answers = [np.ones(len(it), dtype=bool) for it in documents]
    teacher = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    pieces = [
        (torch.tensor(document[at : at + SEQ_LEN + 1]), torch.tensor(marks[at : at + SEQ_LEN + 1]))
        for document, marks in zip(documents, answers, strict=True)
        for at in range(0, len(document) - 1, SEQ_LEN)
    ]

    def loss_of(model: nn.Module) -> torch.Tensor:
        losses = []
        for tokens, marks in pieces:
            logits = model(tokens[None, :-1])[0][marks[1:]]
            hard = F.cross_entropy(logits, tokens[1:][marks[1:]], reduction="none")
            with torch.no_grad():
                top, ids = teacher(tokens[None, :-1]).logits[0][marks[1:]].sort(descending=True)
            p = (top[:, :K] / temperature).softmax(-1)
            q = (logits / temperature).softmax(-1).take_along_dim(ids[:, :K], 1)
            divergence = (p * (p / q).log()).sum(-1)
            losses.append((1 - WEIGHT) * hard + WEIGHT * temperature**2 * divergence)
        return torch.cat(losses).mean()

    return reference._train(loss_of, "fp64", "adamw", SHAPE, reference.EVERYTHING, STEPS)


def assert_equal(run: RunDirectory, expected: reference.CURVE, tolerance: float = 1e-9) -> None:
    found = [(it["loss"], it["grad_norm"]) for it in curve(run)]
    assert found == [pytest.approx(it[:2], rel=tolerance) for it in expected]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("degrees", "stage"),
    [({"pp": 2, "tp": 2}, 0), ({"cp": 2, "dp": 2}, 1), exhaustive(ZBV, 1)],
    ids=str,
)
def test_every_layout_equals_a_plain_loop(
    tmp_path: Path, teacher: Path, degrees: dict[str, Any], stage: int
) -> None:
    packed = "cp" not in degrees  # ranks of cp do not mask documents
    expected = plain_loop(teacher, 2.0, packed)
    config = make_config(tmp_path, dp=degrees.get("dp", 1), stage=stage, parallel=degrees)
    stream = config.data
    config = distilled(config, teacher)
    config = config if packed else replace(config, data=stream)
    run = make_run(config)
    train(run, config)
    assert_equal(run, expected)


@pytest.mark.slow
@pytest.mark.parametrize(("dp", "degrees", "stage"), [exhaustive(2, {}, 3), (1, {"pp": 2}, 1)])
def test_deepspeed_equals_a_plain_loop(
    tmp_path: Path, teacher: Path, dp: int, degrees: dict[str, Any], stage: int
) -> None:
    expected = plain_loop(teacher, 1.0)
    backend = Backend("deepspeed")
    config = make_config(
        tmp_path, dp=dp, stage=stage, parallel=degrees, precision="fp32", backend=backend
    )
    config = distilled(config, teacher, 1.0)
    run = make_run(config)
    train(run, config)
    assert_equal(run, expected, 1e-3)


@pytest.mark.slow
def test_a_resume_reads_the_same_teacher(tmp_path: Path, teacher: Path) -> None:
    write_documents(tmp_path)
    config = distilled(saving_config(tmp_path, dp=2, stage=3), teacher)
    whole = make_run(config, "whole")
    train(whole, config)
    run = make_run(config)
    train(run, config, StopBefore(5))
    other = RunDirectory(shutil.copytree(run.path, tmp_path / "other", symlinks=True))
    stored = (run.teacher / "tokens.bin").read_bytes()
    train(run, config)
    assert resumed_at(run) == [5] and (run.teacher / "tokens.bin").read_bytes() == stored
    assert curve(run) == curve(whole)
    assert_same_weights(run, whole)
    elsewhere = saving_config(tmp_path, parallel={"pp": 2, "tp": 2})
    train(other, distilled(elsewhere, teacher))
    assert_same_training(other, whole)
    (other.teacher / "index.npz").write_bytes(b"damaged")
    with pytest.raises(RuntimeError, match="cannot be read"):
        train(other, config)
    hf_models.save("gpt2", teacher, initializer_range=0.3)
    with pytest.raises(RuntimeError, match="is of other data or of another teacher"):
        train(run, config)


@pytest.mark.slow
def test_further_steps_read_further_samples(tmp_path: Path, teacher: Path) -> None:
    """A run of one step stores its samples only, and a longer one adds the samples of the other steps."""
    write_documents(tmp_path)
    config = distilled(saving_config(tmp_path), teacher)
    run = make_run(config)
    short = replace(config, train=replace(config.train, global_batch=2, micro_batch=1, steps=1))
    train(run, short)
    first = (run.teacher / "tokens.bin").read_bytes()
    train(run, replace(short, train=replace(short.train, steps=4)))
    then = (run.teacher / "tokens.bin").read_bytes()
    assert len(first) == 2 * SEQ_LEN * K * 2 * 8 < len(then) and then.startswith(first)


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("temperature", [1.0, 3.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_chunks_of_the_head_equal_autograd(
    monkeypatch: pytest.MonkeyPatch, temperature: float, dtype: torch.dtype, softcap: float | None
) -> None:
    """The loss of whole logits equals the loss of `model=hf`: another code."""
    from nanoscale.models.hf_model import _cross_entropy

    torch.manual_seed(0)
    weight = torch.randn(32, 8, dtype=dtype, requires_grad=True)
    hidden = torch.randn(2, 9, 8, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, 32, (2, 9)).where(torch.rand(2, 9) < 0.8, -100)
    top, ids = torch.randn(2, 9, 32, dtype=torch.float64).topk(K)
    references = torch.stack([top, ids.double()], -1)
    distillation = Distillation(WEIGHT, temperature)
    module = head.Head(8, 32, bias=False)
    module.weight, module.distillation = nn.Parameter(weight.detach()), distillation
    module.softcap = softcap
    monkeypatch.setattr(head, "LOGITS_AT_ONCE", 5 * 32)
    found = module(hidden, targets, references.view(torch.int64))
    (found / 3).backward()
    grads = hidden.grad, module.weight.grad
    other = hidden.detach().double().requires_grad_()
    logits = F.linear(other, weight.double())
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    expected = distillation.loss(_cross_entropy, logits, targets, references)
    expected_grads = torch.autograd.grad(expected / 3, [other, weight])
    exact = dtype == torch.float64
    torch.testing.assert_close(found.double(), expected, rtol=1e-12 if exact else 1e-2, atol=0)
    for grad, its in zip(grads, expected_grads, strict=True):
        assert grad is not None
        torch.testing.assert_close(
            grad.double(), its.double(), rtol=1e-10, atol=1e-12 if exact else 0.06
        )


def test_samples_carry_the_teacher_into_shorter_rows() -> None:
    from nanoscale.data.batch import Batch

    batch = Batch(
        *(np.arange(16).reshape(2, 8) for _ in range(2)),
        references=np.arange(96.0).reshape(2, 8, 3, 2),
    )
    short = batch.cut(4)
    assert short.references is not None and short.references.shape == (4, 4, 3, 2)
    assert short.references.flatten().tolist() == list(range(96)) and short.counted() == 16
