"""The record of a rank's kernels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nanoscale.config.schema import Config, Parallel
from nanoscale.parallel import kernel_choice
from nanoscale.parallel.kernel_choice import kernels_in_use
from tests.support.jobs import make_config

CPU = torch.device("cpu")


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return make_config(tmp_path, precision="bf16")


def attention(config: Config) -> str | None:
    return kernels_in_use(config, CPU)["attention"]


def test_pytorch_is_asked_with_the_shapes_that_blocks_compute(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    choose = torch._fused_sdp_choice
    monkeypatch.setattr(
        torch, "_fused_sdp_choice", lambda *a, **k: asked.append((a, k)) or choose(*a, **k)
    )
    shape = replace(config.model, heads=8, kv_heads=4, head_dim=16)
    config = replace(config, model=shape, parallel=Parallel(dp=1, tp=2, virtual_stages=1))
    assert attention(config) == "flash"
    assert attention(replace(config, data=replace(config.data, document_mask=True))) == "portable"
    seq = config.train.seq_len
    for (q, k, v, mask, _, causal), more in asked:
        assert q.shape == (1, 4, seq, 16) and k.shape == v.shape == (1, 2, seq, 16)
        assert q.dtype == torch.bfloat16 and q.requires_grad and more["enable_gqa"]
        assert causal and mask is None


def test_pytorch_is_asked_about_narrow_values_that_are_not_padded(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *a, **_: asked.append(a) or 3)
    monkeypatch.setattr(kernel_choice, "takes_narrow_values", lambda *widths: widths == (24, 16))
    latent = replace(config.model, heads=4, kv_heads=4, kv_rank=8, head_dim=24, rope_head_dim=8)
    config = replace(config, model=replace(latent, v_head_dim=16))
    ulysses = Parallel(dp=1, cp=2, cp_method="ulysses", virtual_stages=1)
    for layout in (config.parallel, ulysses):
        assert attention(replace(config, parallel=layout)) == "cudnn"
    assert [(k.shape[-1], v.shape[-1]) for _, k, v, *_ in asked] == [(24, 16), (24, 24)]


def test_the_kernel_that_was_set_is_the_one_in_use(config: Config) -> None:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert attention(config) == "math"
    ring = replace(config, parallel=Parallel(dp=1, cp=2, virtual_stages=1))
    assert attention(ring) == "flash-cpu"
    foreign = replace(config, model=replace(config.model, source="hf"))
    assert attention(foreign) is None


def test_cudnns_version_is_recorded(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    assert kernels_in_use(config, CPU)["cudnn"] == 91900
