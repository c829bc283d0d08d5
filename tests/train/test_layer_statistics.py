"""Statistics of each layer: equal to a plain model's, in every layout."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nanoscale.config.resolved import ResolvedConfig
from nanoscale.data.dataset import open_data
from nanoscale.models.attention import CausalAttention
from nanoscale.models.initialization import initialize
from nanoscale.models.transformer import Transformer
from nanoscale.runs import jsonlines
from tests.support.jobs import make_config, make_run, train, write_tokens
from tests.support.layouts import GEMMA, GPT2, MOE

Figures = dict[str, dict[str, float | None]]


def plain_figures(config: ResolvedConfig) -> Figures:
    """Compute them with one model on one device, from the whole attention matrices."""
    data = open_data(config.data, config.train, config.model.vocab)
    model = Transformer(config.model).double()
    initialize(model, config.model, config.train.seed)
    (batch,) = data.train.micro_batches(
        0, config.train.global_batch, 0, 1, config.train.global_batch
    )
    results: dict[str, Tensor] = {}
    scores: dict[str, float] = {}

    def note_scores(name: str, inputs: tuple[Any, ...]) -> None:
        q, k, _, mask = inputs
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        products = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(q.shape[-1])
        seq = torch.arange(q.shape[2])
        sees = seq[:, None] >= seq
        if mask is not None:
            assert mask.window == 7
            sees &= seq[:, None] - seq < mask.window
        scores[name] = products[sees.expand_as(products)].max().item()

    for number, layer in model.layers.items():
        name = f"layers.{number}"
        layer.register_forward_hook(lambda _, i, out, name=name: results.update({name: out}))
        core = layer.attention.core
        assert isinstance(core, CausalAttention)
        core.register_forward_pre_hook(lambda _, inputs, name=name: note_scores(name, inputs))
    first = model.layers["0"]
    first.register_forward_pre_hook(lambda _, inputs: results.update({"embed": inputs[0]}))
    loss = model(torch.from_numpy(batch.inputs), None, torch.from_numpy(batch.targets))
    (loss / batch.counted()).backward()
    figures: Figures = {}
    modules = [
        "embed",
        "positions",
        *(f"layers.{number}" for number in model.layers),
        "norm",
        "head",
    ]
    for name in modules:
        parameters = [p for n, p in model.named_parameters() if f"{n}.".startswith(f"{name}.")]
        if not parameters:
            continue
        gradients = [p.grad for p in parameters if p.grad is not None]
        out = results.get(name)
        figures[name] = {
            "weight_norm": math.sqrt(sum(p.square().sum().item() for p in parameters)),
            "grad_norm": math.sqrt(sum(g.square().sum().item() for g in gradients)),
            "rms": None if out is None else out.square().mean().sqrt().item(),
            "largest": None if out is None else out.abs().max().item(),
            "score": scores.get(name),
        }
    return figures


LAYOUTS: list[dict[str, Any]] = [
    {},
    {"micro_batch": 2, "model": GPT2},
    {"model": GEMMA},
    {"dp": 2, "stage": 0},
    {"dp": 2, "stage": 2, "parallel": {"activation_checkpointing": "full"}},
    {"dp": 2, "stage": 3, "model": MOE, "parallel": {"ep": 2}},
    {"parallel": {"tp": 2, "sequence_parallel": True, "activation_checkpointing": "selective"}},
    {"parallel": {"tp": 2, "sequence_parallel": False}},
    {"parallel": {"pp": 2}},
    {"parallel": {"cp": 2}},
]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_they_are_those_of_a_plain_model(tmp_path: Path, layout: dict[str, Any]) -> None:
    write_tokens(tmp_path)
    config = make_config(tmp_path, **{"micro_batch": 4, **layout})
    config = replace(config, train=replace(config.train, steps=3, statistics_every=1))
    run = make_run(config)
    train(run, config)
    lines = jsonlines.read(run.statistics)
    assert [line["step"] for line in lines] == [1, 2, 3]
    found, expected = lines[0]["modules"], plain_figures(config)
    assert list(found) == list(expected)
    for name, figures in expected.items():
        if config.parallel.cp > 1:
            figures["score"] = None
        for key, value in figures.items():
            approximately = None if value is None else pytest.approx(value, rel=1e-9)
            assert found[name][key] == approximately, (name, key)
    assert lines[2]["modules"]["layers.1"]["weight_norm"] != expected["layers.1"]["weight_norm"]


def test_they_do_not_change_the_training(tmp_path: Path) -> None:
    write_tokens(tmp_path)
    losses = []
    for every in (0, 2):
        config = make_config(tmp_path)
        config = replace(config, train=replace(config.train, steps=4, statistics_every=every))
        run = make_run(config, f"every-{every}")
        train(run, config)
        losses.append([line["loss"] for line in jsonlines.read(run.metrics)])
    assert losses[0] == losses[1]
