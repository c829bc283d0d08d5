from __future__ import annotations

import cmath
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from nanoscale.config.composing.compose import compose
from nanoscale.config.composing.library import Library
from nanoscale.config.model_math import parameters
from nanoscale.config.parameters import named
from nanoscale.config.schema import Model, RopeScaling
from nanoscale.models.attention_kernels import takes_narrow_values
from nanoscale.models.initialization import draw, initialize
from nanoscale.models.rope import rope_rotation, rotate, scale_frequencies
from nanoscale.models.transformer import LatentAttention, Transformer
from nanoscale.plan.memory.shards import rank_stages
from tests.support.recipes import complete

LLAMA = Model(
    layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=50, rope_theta=1e4
)
GPT2 = Model(
    layers=2,
    hidden=32,
    heads=4,
    kv_heads=4,
    head_dim=8,
    ffn=64,
    vocab=50,
    norm="layernorm",
    mlp="gelu",
    position="learned",
    bias=True,
    tie_embeddings=True,
    max_seq_len=16,
    norm_eps=0.1,
)


def make(shape: Model) -> Transformer:
    model = Transformer(shape).double()
    initialize(model, shape, seed=1)
    return model


# Long waves have more than 16 positions, short ones fewer than 4.
STRETCH = RopeScaling(factor=8, low_freq_factor=1, high_freq_factor=4, original_seq_len=16)


def llama31_frequency(frequency: float, scaling: RopeScaling | None) -> float:
    """Return the frequency by cases, as Meta's code defines it."""
    if scaling is None:
        return frequency
    wavelength = 2 * math.pi / frequency
    if wavelength < scaling.original_seq_len / scaling.high_freq_factor:
        return frequency
    if wavelength > scaling.original_seq_len / scaling.low_freq_factor:
        return frequency / scaling.factor
    smooth = scaling.original_seq_len / wavelength - scaling.low_freq_factor
    smooth /= scaling.high_freq_factor - scaling.low_freq_factor
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"head_dim": 6, "layers": 3, "init_std": 0.3},
        {"head_dim": 12, "norm_eps": 0.3, "init_std": 0.3},
        {"rope_scaling": STRETCH, "rope_theta": 100.0, "init_std": 0.3},
    ],
    ids=["llama", "narrow heads", "wide heads, eps", "rope_scaling"],
)
def test_llama_equals_its_equations(changes: dict[str, Any]) -> None:
    """One sequence, position by position and head by head, in complex numbers."""
    shape = replace(LLAMA, **changes)
    model = make(shape)
    tokens = torch.randint(0, 50, (10,), generator=torch.Generator().manual_seed(0))
    weights = dict(model.named_parameters())
    dim = shape.head_dim

    def rms(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        return x / torch.sqrt((x**2).mean(-1, keepdim=True) + shape.norm_eps) * gain

    def turn(x: torch.Tensor, position: int) -> torch.Tensor:
        pairs = torch.complex(x[: dim // 2], x[dim // 2 :])
        frequencies = [shape.rope_theta ** (-2 * i / dim) for i in range(dim // 2)]
        angles = [position * llama31_frequency(f, shape.rope_scaling) for f in frequencies]
        turned = pairs * torch.tensor([cmath.rect(1, a) for a in angles], dtype=torch.complex128)
        return torch.cat((turned.real, turned.imag))

    x = weights["embed.weight"][tokens]
    for layer in range(shape.layers):
        w = {n.split(".", 2)[2]: p for n, p in weights.items() if n.startswith(f"layers.{layer}.")}
        h = rms(x, w["attention_norm.weight"])
        mixed = x.new_zeros(10, 4 * dim)
        for head in range(4):
            rows = slice(head * dim, head * dim + dim)
            shared = slice(head // 2 * dim, head // 2 * dim + dim)
            q = [turn(w["attention.wq.weight"][rows] @ h[t], t) for t in range(10)]
            k = [turn(w["attention.wk.weight"][shared] @ h[t], t) for t in range(10)]
            v = [w["attention.wv.weight"][shared] @ h[t] for t in range(10)]
            for t in range(10):
                scores = torch.stack([q[t] @ k[s] for s in range(t + 1)]) / math.sqrt(dim)
                mixed[t, rows] = torch.softmax(scores, 0) @ torch.stack(v[: t + 1])
        x = x + mixed @ w["attention.wo.weight"].T
        h = rms(x, w["mlp_norm.weight"])
        gate, up = h @ w["mlp.gate.weight"].T, h @ w["mlp.up.weight"].T
        x = x + (gate * torch.sigmoid(gate) * up) @ w["mlp.down.weight"].T
    expected = rms(x, weights["norm.weight"]) @ weights["head.weight"].T
    torch.testing.assert_close(model(tokens[None])[0], expected, rtol=1e-10, atol=1e-10)


def test_gpt2_equals_torch_encoder_layers() -> None:
    model = make(GPT2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.normal_(generator=torch.Generator().manual_seed(parameter.numel()))
    tokens = torch.randint(0, 50, (3, 16), generator=torch.Generator().manual_seed(0))
    x = model.embed.weight[tokens] + model.positions.weight[:16]
    mask = torch.nn.Transformer.generate_square_subsequent_mask(16, dtype=torch.double)
    for block in model.layers.values():
        layer = torch.nn.TransformerEncoderLayer(
            32,
            4,
            64,
            dropout=0,
            activation=lambda x: F.gelu(x, approximate="tanh"),
            norm_first=True,
            batch_first=True,
            layer_norm_eps=0.1,
            dtype=torch.double,
        )
        attention, mlp = block.attention, block.mlp
        qkv = (attention.wq, attention.wk, attention.wv)
        with torch.no_grad():
            layer.self_attn.in_proj_weight.copy_(torch.cat([p.weight for p in qkv]))
            layer.self_attn.in_proj_bias.copy_(torch.cat([p.bias for p in qkv]))
        layer.self_attn.out_proj.load_state_dict(attention.wo.state_dict())
        layer.linear1.load_state_dict(mlp.up.state_dict())
        layer.linear2.load_state_dict(mlp.down.state_dict())
        layer.norm1.load_state_dict(block.attention_norm.state_dict())
        layer.norm2.load_state_dict(block.mlp_norm.state_dict())
        x = layer(x, src_mask=mask, is_causal=True)
    last = F.layer_norm(x, (32,), model.norm.weight, model.norm.bias, 0.1)
    expected = last @ model.embed.weight.T
    torch.testing.assert_close(model(tokens), expected, rtol=1e-10, atol=1e-10)


def test_no_token_sees_a_later_one() -> None:
    for shape in (LLAMA, GPT2):
        model = make(shape)
        tokens = torch.randint(0, 50, (1, 12))
        changed = tokens.clone()
        changed[0, 7] = (changed[0, 7] + 1) % 50
        before, after = model(tokens)[0], model(changed)[0]
        torch.testing.assert_close(before[:7], after[:7])
        assert not torch.allclose(before[7:], after[7:])


def test_rotation_keeps_relative_positions_only() -> None:
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.double)
    far = replace(LLAMA, max_seq_len=10000)

    def score(at: int, distance: int) -> float:
        positions = torch.tensor([at, at + distance])
        cos, sin = rope_rotation(far, positions, torch.float64, 2)
        left = rotate(q, (cos[:1], sin[:1]))
        right = rotate(k, (cos[1:], sin[1:]))
        return (left * right).sum().item()

    assert math.isclose(score(0, 5), score(5000, 5), rel_tol=1e-9)
    assert not math.isclose(score(0, 5), score(0, 6), rel_tol=1e-3)


def test_llama31_scaling_keeps_fast_and_stretches_slow_frequencies() -> None:
    scaling = RopeScaling(factor=8, low_freq_factor=1, high_freq_factor=4, original_seq_len=8192)
    wavelength = torch.tensor([10.0, 2047.0, 4096.0, 8193.0, 1e6], dtype=torch.double)
    frequency = 2 * math.pi / wavelength
    ratio = (scale_frequencies(frequency, scaling, 500000.0, 2) / frequency).tolist()
    # At half the original context: (8192/4096 - 1) / (4 - 1) = 1/3 of the frequency is kept.
    expected = [1, 1, 1 / 3 + 2 / 3 / 8, 1 / 8, 1 / 8]
    torch.testing.assert_close(torch.tensor(ratio), torch.tensor(expected))


def test_initial_weights_depend_on_seed_and_name_alone() -> None:
    first, again, other = make(LLAMA), make(LLAMA), Transformer(LLAMA).double()
    initialize(other, LLAMA, seed=2)
    deeper = make(replace(LLAMA, layers=5))
    assert len(list(deeper.parameters())) > len(list(first.parameters()))
    for name, value in first.named_parameters():
        assert torch.equal(value, again.get_parameter(name))
        if name.endswith(("wo.weight", "down.weight")):
            narrower = deeper.get_parameter(name)
            torch.testing.assert_close(narrower, value * math.sqrt(2 / 5), rtol=1e-6, atol=0)
        else:
            assert torch.equal(value, deeper.get_parameter(name))
        if value.ndim > 1:
            assert not torch.equal(value, other.get_parameter(name))


def test_initial_weights_have_the_published_spread() -> None:
    cpu = torch.device("cpu")
    size = torch.Size((400, 500))
    wide = draw("layers.0.attention.wq.weight", size, LLAMA, 0, cpu)
    assert abs(wide.std().item() - 0.02) < 2e-4 and abs(wide.mean().item()) < 2e-4
    for layers, factor in ((2, 1 / 2), (8, 1 / 4)):  # 1/sqrt(2 * layers)
        for name in ("layers.0.mlp.down.weight", "layers.1.attention.wo.weight"):
            narrow = draw(name, size, replace(LLAMA, layers=layers), 0, cpu)
            assert abs(narrow.std().item() - 0.02 * factor) < 1e-4
    assert torch.equal(
        draw("layers.0.mlp.down.bias", torch.Size((4,)), GPT2, 0, cpu), torch.zeros(4)
    )
    assert torch.equal(draw("norm.weight", torch.Size((4,)), GPT2, 0, cpu), torch.ones(4))


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", sorted(Library().options("model").keys() - {"hf", "hooks"}))
def test_the_counted_parameters_are_the_models(
    name: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shape = replace(compose([f"model={name}"]).config.model, tie_embeddings=tied)
    with torch.device("meta"):
        model = Transformer(shape)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters(shape)


QWEN2, QWEN3 = replace(LLAMA, qkv_bias=True), replace(LLAMA, qk_norm=True)


@pytest.mark.parametrize(
    "base", [LLAMA, GPT2, QWEN2, QWEN3], ids=["llama", "gpt2", "qwen2", "qwen3"]
)
@pytest.mark.parametrize("head_dim", [4, 8, 16])
@pytest.mark.parametrize("bias", [True, False])
def test_the_counted_parameters_are_those_of_odd_shapes(
    base: Model, head_dim: int, bias: bool
) -> None:
    shape = replace(base, head_dim=head_dim, bias=bias, kv_heads=1)
    count = sum(parameter.numel() for parameter in Transformer(shape).parameters())
    assert count == parameters(shape)
    (stage,) = rank_stages(complete(model=shape))[0]
    assert count == stage.numel


@pytest.mark.parametrize(
    "shape",
    [
        LLAMA,
        GPT2,
        QWEN2,
        QWEN3,
        replace(LLAMA, bias=True, tie_embeddings=True),
        replace(LLAMA, experts=4),
        replace(QWEN3, experts=4),
        replace(QWEN2, experts=4, shared_ffn=24, shared_gate=True),
        replace(QWEN2, experts=4, router="sigmoid", shared_ffn=24, dense_layers=1, dense_ffn=40),
        replace(LLAMA, kv_rank=20, q_rank=12, head_dim=10, rope_head_dim=4, v_head_dim=8),
        replace(LLAMA, kv_rank=20, head_dim=10, rope_head_dim=4),
    ],
    ids=[
        "llama",
        "gpt2",
        "qwen2",
        "qwen3",
        "bias",
        "mixtral",
        "qwen3-moe",
        "qwen2-moe",
        "glm4-moe",
        "mla",
        "mla without a latent of queries",
    ],
)
def test_the_table_of_parameters_is_the_models_own(shape: Model) -> None:
    with torch.device("meta"):
        state = Transformer(shape).state_dict()
    table = {name: parameter.shape for name, parameter in named(shape).items()}
    assert table == {name: tuple(value.shape) for name, value in state.items()}


LATENT = replace(
    LLAMA, kv_heads=4, kv_rank=20, q_rank=12, head_dim=12, rope_head_dim=4, v_head_dim=8
)


def test_values_are_as_wide_as_keys_unless_the_kernel_takes_narrow_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    widths = []
    attend = F.scaled_dot_product_attention

    def attention(q: Any, k: Any, v: Any, **options: Any) -> Any:
        widths.append(v.shape[-1])
        assert v.transpose(1, 2).is_contiguous()
        return attend(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    torch.manual_seed(0)
    layer = LatentAttention(LATENT).bfloat16()
    hidden = torch.randn(2, 6, LATENT.hidden, dtype=torch.bfloat16, requires_grad=True)
    results = []
    for narrow in (False, True):
        layer.narrow_values = narrow
        out = layer(hidden, None)
        results.append(
            (out, *torch.autograd.grad(out.square().sum(), (hidden, layer.wkv_b.weight)))
        )
    for padded, unpadded in zip(*results, strict=True):
        torch.testing.assert_close(padded, unpadded, atol=0.02, rtol=0.02)
    assert widths == [12, 8]
    layer.float()(hidden.float(), None)
    assert widths[2:] == [12], "cuDNN's attention takes bf16 and fp16 alone"


@pytest.mark.parametrize(
    ("capability", "hip", "enabled", "chosen", "expected"),
    [
        ((9, 0), None, True, 3, True),
        ((10, 3), None, True, 3, True),
        ((9, 0), None, True, 1, False),
        ((9, 0), None, False, 3, False),
        ((8, 0), None, True, 3, False),
        ((10, 3), "7.0", True, 3, False),
    ],
)
def test_pytorch_is_asked_whether_it_takes_narrow_values(
    capability: tuple[int, int],
    hip: str | None,
    enabled: bool,
    chosen: int,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    empty, asked = torch.empty, []

    def choose(q: Any, k: Any, v: Any, *_: Any) -> int:
        asked.append((q.shape[-1], k.shape[-1], v.shape[-1], v.requires_grad))
        return chosen

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: enabled)
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k | {"device": "cpu"}))
    monkeypatch.setattr(torch, "_fused_sdp_choice", choose)
    assert takes_narrow_values(192, 128) is expected
    assert not takes_narrow_values(128, 128)
    assert set(asked) <= {(192, 192, 128, True)}
