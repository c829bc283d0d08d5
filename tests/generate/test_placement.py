"""A model whose blocks are divided over devices, real ones on the CPU and played GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from nanoscale.config.schema import Model
from nanoscale.generate.weights import materialize
from nanoscale.models.initialization import initialize
from nanoscale.models.kv_cache import Cache
from nanoscale.models.transformer import Transformer

SHAPE = Model(
    layers=6, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=64, max_seq_len=32, init_std=0.2
)
EXPERTS = replace(SHAPE, experts=4, experts_per_token=2, sliding_window=7)
GPUS = [torch.device(f"cuda:{number}") for number in range(3)]


def made(shape: Model, devices: list[torch.device]) -> Transformer:
    with torch.device("meta"):
        model = Transformer(shape)
    model.requires_grad_(False)
    materialize(model, devices)
    return model


@pytest.mark.parametrize("shape", [SHAPE, EXPERTS], ids=["dense", "experts"])
def test_the_logits_are_those_of_one_device(shape: Model) -> None:
    cpu = torch.device("cpu")
    one, several = made(shape, [cpu]), made(shape, [cpu] * 3)
    tokens = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    found = []
    for model in (one, several):
        initialize(model, shape, seed=4)
        cache = Cache(model, batch=2, max_length=14)
        found.append([cache.logits(tokens), cache.logits(tokens[:, :2], last_only=True)])
    for whole, divided in zip(*found, strict=True):
        assert torch.equal(whole, divided)


def to_empty(module: nn.Module, *, device: torch.device) -> None:
    """Do what torch's method does, which cannot exchange played tensors."""
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, old in tensors.items():
                if old is not None:
                    new = torch.empty(old.shape, dtype=old.dtype, device=device)
                    tensors[name] = nn.Parameter(new, False) if tensors is part._parameters else new


@pytest.mark.parametrize("tied", [False, True])
def test_each_device_computes_with_what_it_has(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation of tensors on two devices would fail, as on GPUs."""
    monkeypatch.setattr(nn.Module, "to_empty", to_empty)
    shape = replace(SHAPE, tie_embeddings=tied)
    with FakeTensorMode():
        model = made(shape, GPUS)
        logits = model(torch.zeros(2, 5, dtype=torch.long, device=GPUS[0]))
        Cache(model, batch=2, max_length=14)
    keys = [layer.attention.core.keys.device for layer in model.layers.values()]
    assert keys == [next(layer.parameters()).device for layer in model.layers.values()]
    assert keys == [GPUS[number] for number in (0, 0, 1, 1, 2, 2)]
    assert model.embed.weight.device == GPUS[0]
    assert logits.device == GPUS[0 if tied else 2]
