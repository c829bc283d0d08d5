"""The record of a rank's kernels."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import attention as torch_attention

from nanoscale.config.schema import Config, Parallel
from nanoscale.models.attention_kernels import KERNELS, Attended, Limits, Pairs
from nanoscale.parallel import kernel_choice, newest_flash
from nanoscale.parallel.kernel_choice import kernels_in_use
from nanoscale.parallel.newest_flash import use_newest_flash
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


PORTABLE = KERNELS["portable"]


def rows_of(x: Any) -> Any:
    """Return packed tokens of one row, `[tokens, heads, width]`, as `[1, heads, tokens, width]`."""
    return x.transpose(0, 1).unsqueeze(0)


def pairs_of(arguments: Any, left: int = -1, scale: float = 1.0, **_: Any) -> Pairs:
    queries, keys, longest, _, _, causal, _ = arguments
    window = left + 1 or None
    return Pairs(causal or left >= 0, scale, Limits(queries, keys, longest, window))


class Flash:
    """FlashAttention for CPUs in the place of PyTorch's, and of a package's that errs as a test wants."""

    def __init__(self) -> None:
        self.library = torch.library.Library("aten", "IMPL")
        self.library.impl("_flash_attention_forward", self.forward, "CPU")
        self.library.impl("_flash_attention_backward", self.backward, "CPU")
        self.library.impl("_scaled_dot_product_flash_attention", self.dense, "CPU")
        self.library.impl(
            "_scaled_dot_product_flash_attention_backward", self.dense_backward, "CPU"
        )
        self.error, self.active = "", False

    def __call__(self) -> Any:
        self.active = True
        return self

    def remove(self) -> None:
        self.active = False

    def forward(self, q: Any, k: Any, v: Any, *rest: Any, **options: Any) -> Any:
        pairs = pairs_of(rest, options.pop("window_size_left"), **options)
        if self.active and self.error == "window" and pairs.limits and pairs.limits.window:
            raise RuntimeError("no windows\nhere")
        out, lse = PORTABLE.forward(rows_of(q), rows_of(k), rows_of(v), pairs)
        unread = torch.empty(0)
        return out[0].transpose(0, 1).to(q.dtype), lse[0], unread, unread, unread

    def backward(self, grad: Any, *rest: Any, **options: Any) -> Any:
        *whole, lse = rest[:5]
        pairs = pairs_of((*rest[5:11], None), options.pop("window_size_left"), **options)
        attended = Attended._make([*map(rows_of, whole), lse.unsqueeze(0)])
        grads = PORTABLE.backward(rows_of(grad), attended, pairs)
        factor = 1.1 if self.active and self.error == "gradient" else 1.0
        return tuple(factor * x[0].transpose(0, 1) for x in grads)

    def dense(self, q: Any, k: Any, v: Any, _: float, causal: bool, *, scale: float) -> Any:
        if self.active and self.error == "whole rows":
            raise RuntimeError("no whole rows")
        out, lse = PORTABLE.forward(q, k, v, Pairs(causal, scale))
        unread = torch.empty(0)
        return out.to(q.dtype), lse, unread, unread, 0, 0, unread, unread, unread

    def dense_backward(self, grad: Any, *rest: Any, scale: float) -> Any:
        return PORTABLE.backward(grad, Attended._make(rest[:5]), Pairs(True, scale))


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Iterator[Flash]:
    """A machine with a Hopper GPU and FlashAttention 3."""
    made = Flash()
    monkeypatch.setattr(newest_flash, "has_cuda_flash", lambda: True)
    monkeypatch.setattr(
        newest_flash, "find_spec", lambda name: name == "flash_attn_interface" or find_spec(name)
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    implementations = torch_attention._registry._FLASH_ATTENTION_IMPLS
    monkeypatch.setitem(implementations, "FA3", made)
    yield made
    torch_attention.restore_flash_attention_impl(False)
    made.library._destroy()


@pytest.mark.parametrize(
    ("error", "why"),
    [
        ("", None),
        ("window", "no windows"),
        ("whole rows", "no whole rows$"),
        ("gradient", "Tensor-likes are not"),
    ],
)
def test_an_installed_flash_attention_is_used_if_it_computes_the_same(
    error: str, why: str | None, config: Config, flash: Flash, recwarn: Any
) -> None:
    flash.error = error
    config = replace(config, model=replace(config.model, heads=4, kv_heads=2, sliding_window=50))
    use_newest_flash(config, CPU)
    assert kernels_in_use(config, CPU)["flash"] == (None if error else "FA3")
    assert flash.active == (not error)
    warned = [str(it.message) for it in recwarn if "FA3" in str(it.message)]
    assert [re.search(why or "", it) is not None for it in warned] == [True] * bool(why)


def test_a_machine_without_another_flash_attention_warns_of_none(
    config: Config, flash: Flash, monkeypatch: pytest.MonkeyPatch, recwarn: Any
) -> None:
    monkeypatch.setattr(newest_flash, "find_spec", find_spec)
    use_newest_flash(config, CPU)
    assert not flash.active and not [it for it in recwarn if "a trial" in str(it.message)]


@pytest.mark.parametrize("way", ["deterministic", "fp32", "cudnn"])
def test_jobs_that_do_not_want_it_keep_pytorchs_own(way: str, config: Config, flash: Flash) -> None:
    precision = replace(config.precision, deterministic=way == "deterministic")
    precision = replace(precision, compute="fp32") if way == "fp32" else precision
    backend = replace(config.backend, attention="cudnn") if way == "cudnn" else config.backend
    use_newest_flash(replace(config, precision=precision, backend=backend), CPU)
    assert not flash.active
