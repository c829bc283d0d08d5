"""Encoders (`train.objective=masked`): the losses of transformers' own model and loss, in every layout."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanoscale.checkpoint.hf.export import export
from nanoscale.checkpoint.store import find_checkpoint
from nanoscale.config.hf import any_model
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.schema import Backend, Checkpoint, Model
from nanoscale.data.batch import IGNORED
from nanoscale.data.dataset import open_data
from nanoscale.data.samples import Masked, RandomSamples
from tests.support.hf_models import COMMON
from tests.support.jobs import (
    make_config,
    make_run,
    read_metrics,
    train,
    trained_and_resumed,
    write_tokens,
)
from tests.support.rows import exhaustive

MASK = 63
DEEPSPEED = {"backend": Backend("deepspeed"), "precision": "fp32"}


def encoder(folder: Path) -> Model:
    """Save an encoder with random weights; return the shape that the launcher makes of it."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    BertForMaskedLM(BertConfig(**COMMON)).save_pretrained(folder)
    document = json.loads((folder / "config.json").read_text())
    return Model(
        source="hf", name=str(folder), init_from=str(folder), hf_config=document, **any_model.sizes(document)
    )  # fmt: skip


def job(folder: Path, **layout: Any) -> ResolvedConfig:
    config = make_config(folder, model=encoder(folder / "bert"), **layout)
    objective = {"objective": "masked", "mask_share": 0.3, "mask_token": MASK}
    return replace(config, train=replace(config.train, **objective))


def plain_losses(config: ResolvedConfig) -> list[float]:
    """Train transformers' model in a plain loop, with the loss that it computes itself."""
    from transformers import AutoModelForMaskedLM

    model = AutoModelForMaskedLM.from_pretrained(config.model.name, dtype=torch.float64).eval()
    data, steps = open_data(config.data, config.train, config.model.vocab), config.train.steps
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    update = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    for step in range(steps):
        size = config.train.global_batch
        (batch,) = data.train.micro_batches(step * size, size, 0, 1, size)
        tokens, labels = torch.from_numpy(batch.inputs), torch.from_numpy(batch.targets)
        update.zero_grad()
        loss = model(input_ids=tokens, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        falling = 0.1 + 0.9 * (1 + np.cos(np.pi * (step - 2) / (steps - 3))) / 2
        for group in update.param_groups:
            group["lr"] = 1e-2 * ((step + 1) / 3 if step < 2 else falling)
        update.step()
        losses.append(loss.item())
    return losses


LAYOUTS: list[Any] = [
    {"dp": 2, "stage": 3, "parallel": {"activation_checkpointing": "full"}},
    exhaustive({"dp": 2, "stage": 2, **DEEPSPEED}),
]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_trains_what_transformers_trains(
    tmp_path: Path, layout: dict[str, Any]
) -> None:
    write_tokens(tmp_path)
    config = job(tmp_path, **layout)
    run = make_run(config)
    train(run, config)
    losses = [record["loss"] for record in read_metrics(run)]
    assert losses == pytest.approx(plain_losses(config), rel=1e-3 if "backend" in layout else 1e-9)


@pytest.mark.slow
def test_a_resume_is_exact_and_an_export_predicts(tmp_path: Path) -> None:
    write_tokens(tmp_path)
    config = replace(job(tmp_path), checkpoint=Checkpoint(every=3))
    whole = trained_and_resumed(config, 3)

    from transformers import AutoModelForMaskedLM

    stored = find_checkpoint(whole.checkpoints, None)
    export(stored, config, tmp_path / "out", "fp64", 1 << 30, lambda *_: None)
    found = AutoModelForMaskedLM.from_pretrained(tmp_path / "out", dtype=torch.float64)
    begun = AutoModelForMaskedLM.from_pretrained(config.model.name, dtype=torch.float64)
    tokens = torch.arange(1, 13).unsqueeze(0)
    assert not torch.equal(found(tokens).logits, begun(tokens).logits)


def test_tokens_are_hidden_as_in_bert(tmp_path: Path) -> None:
    settings = replace(job(tmp_path).train, mask_share=0.15)
    plain = RandomSamples(0, 400, 512, seed=5, vocab=64)
    masked = Masked(plain, settings, vocab=64)
    numbers = list(range(400))
    before, after = plain.batch(numbers).inputs, masked.batch(numbers)
    chosen = after.targets != IGNORED
    assert np.array_equal(after.targets[chosen], before[chosen])
    assert np.array_equal(after.inputs[~chosen], before[~chosen])
    assert chosen.mean() == pytest.approx(0.15, rel=0.02)
    now, was = after.inputs[chosen], before[chosen]
    is_hidden, stays = now == MASK, now == was
    # one of 64 tokens is the mask's own, and another token may be the same
    assert is_hidden.mean() == pytest.approx(0.8 + 0.1 / 64 + 0.1 / 64, rel=0.02)
    assert stays.mean() == pytest.approx(0.1 + 0.1 / 64 + 0.8 / 64, rel=0.05)
    again = masked.batch([7, 3])
    assert np.array_equal(again.inputs, after.inputs[[7, 3]])
