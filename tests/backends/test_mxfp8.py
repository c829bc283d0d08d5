"""Products in MXFP8, computed on the CPU as torchao emulates them, and of experts in fp8, whose kernels are
registered for the CPU: numbers of a layer, and layouts of a job."""

from __future__ import annotations

from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.gpu import cpu_kernels
from nanoscale.backends import low_bits
from nanoscale.config.dtypes import fp8_tile
from nanoscale.config.layout import keeps_narrow_experts
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.schema import Model
from nanoscale.models import moe
from nanoscale.models.moe import ExpertPairs, spread, sum_rows
from nanoscale.models.narrow_experts import cast_matrices, multiply_narrow, narrow_gradients
from nanoscale.models.transformer import Transformer
from tests.support.layouts import Row, record_all, row_config
from tests.support.ranks import run_ranks
from tests.support.rows import exhaustive, usual_rows
from tests.support.token_files import write_indexed

mxfp8_linear = pytest.importorskip(
    "torchao.prototype.moe_training.mxfp8_linear", reason="pip install 'torchao>=0.18'"
)

BLOCK, LARGEST = 32, 448
"""Numbers with one scale, and e4m3's largest number."""
SEQ = 64
SHAPE = Model(
    layers=2, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=128, vocab=96, max_seq_len=SEQ,
    init_std=0.2,
)  # fmt: skip
MOE = replace(SHAPE, experts=4, experts_per_token=2)
SHARED = replace(MOE, shared_ffn=64, shared_gate=True, dense_layers=1, dense_ffn=128)


def in_mxfp8(x: Tensor) -> Tensor:
    """Round the rows of `x` to MXFP8, in fp64: the smallest power of two with which no number is too large."""
    blocks = x.double().unflatten(-1, (-1, BLOCK))
    scales = 2.0 ** (blocks.abs().amax(-1, keepdim=True) / LARGEST).log2().ceil()
    scales = torch.where(scales == 0, 1.0, scales)
    return ((blocks / scales).float().to(torch.float8_e4m3fn).double() * scales).flatten(-2)


def in_fp8(x: Tensor) -> Tensor:
    """Round `x` to e4m3 with one scale for each row, in fp64: the largest power of two that fits."""
    largest = x.double().abs().amax(-1, keepdim=True)
    scales = torch.where(largest == 0, 1.0, 2.0 ** (LARGEST / largest).log2().floor())
    return (x.double() * scales).float().to(torch.float8_e4m3fn).double() / scales


def converted(outputs: int, inputs: int) -> Any:
    shape = replace(SHAPE, layers=1, hidden=inputs, ffn=outputs)
    model = Transformer(shape)
    low_bits.use_float8(model, "mxfp8", emulate=True)
    return model.layers["0"].get_submodule("mlp.gate").bfloat16()


def test_the_three_products_of_a_layer_round_what_they_sum() -> None:
    layer = converted(96, 64)
    assert type(layer) is mxfp8_linear.MXFP8Linear
    dice = torch.Generator().manual_seed(1)
    layer.weight.data = torch.randn(96, 64, generator=dice).bfloat16()
    x = torch.randn(2, SEQ, 64, generator=dice).bfloat16()
    x[0, 0, 0] = 300.0  # an outlier costs the numbers of its block
    x.requires_grad_()
    grad = (1e-4 * torch.randn(2, SEQ, 96, generator=dice)).bfloat16()
    out = layer(x)
    found = [out, *torch.autograd.grad(out, [x, layer.weight], grad)]
    rows, rows_of_grad = x.detach().flatten(0, 1), grad.flatten(0, 1)
    weight = layer.weight.detach()

    def products(rounded: Any) -> list[Tensor]:
        return [
            rounded(rows) @ rounded(weight).T,
            rounded(rows_of_grad) @ rounded(weight.T).T,
            rounded(rows_of_grad.T) @ rounded(rows.T).T,
        ]

    for one, expected, exact in zip(
        found, products(in_mxfp8), products(torch.Tensor.double), strict=True
    ):
        assert difference(one.view(expected.shape), expected) < 2**-8  # of the result, in bf16
        assert 0.01 < difference(one.view(exact.shape), exact) < 2**-4


def difference(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("biased", [False, True])
def test_names_and_head_stay(biased: bool) -> None:
    with torch.device("meta"):
        model, plain = (Transformer(replace(SHAPE, bias=biased)) for _ in range(2))
    low_bits.use_float8(model, "mxfp8", emulate=True)
    of = [name for name, it in model.named_modules() if isinstance(it, mxfp8_linear.MXFP8Linear)]
    assert len(of) == 7 * SHAPE.layers and all(name.startswith("layers.") for name in of)
    shapes = ({name: it.shape for name, it in m.named_parameters()} for m in (model, plain))
    assert next(shapes) == next(shapes)


def test_small_matrices_stay_in_16_bits() -> None:
    """The matrices are Llama 3.2 1B's."""
    with torch.device("meta"):
        model = Transformer(
            replace(SHAPE, hidden=2048, heads=32, kv_heads=8, head_dim=64, ffn=8192)
        )
    low_bits.use_float8(model, "mxfp8")
    kept = [name for name, it in model.layers["0"].named_modules() if type(it) is nn.Linear]
    assert kept == ["attention.wk", "attention.wv"]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", ["mxfp8", "rowwise"])
def test_products_of_experts_round_what_they_sum(recipe: str, compiled: bool) -> None:
    """An expert's rows are a multiple of a tile with zeros; the second one has none."""
    cpu_kernels.register()
    dice, load = torch.Generator().manual_seed(2), [40, 0, 7, 32]
    rows = torch.randn(sum(load), 64, generator=dice).bfloat16().requires_grad_()
    weight = torch.randn(4, 96, 64, generator=dice).bfloat16().requires_grad_()
    grad = torch.randn(sum(load), 96, generator=dice).bfloat16()
    chosen = torch.arange(4).repeat_interleave(torch.tensor(load)).unsqueeze(1)
    round_rows = in_mxfp8 if recipe == "mxfp8" else in_fp8

    def multiply(rows: Tensor, weight: Tensor) -> Tensor:
        pairs = ExpertPairs.of_choices(chosen, 4, len(chosen), tile=fp8_tile(recipe))
        ends = pairs.load.cumsum(0, dtype=torch.int32)
        x = spread(F.pad(rows, (0, 0, 0, 1)), pairs)
        return sum_rows(multiply_narrow(recipe, ends, [x], [weight])[0], pairs)[:-1]

    out = (torch.compile(multiply, fullgraph=True) if compiled else multiply)(rows, weight)
    found = [out, *torch.autograd.grad(out, [rows, weight], grad)]

    def products(rounded: Any) -> list[Tensor]:
        results = []
        for x, matrix, of_out in zip(
            rows.detach().split(load), weight.detach(), grad.split(load), strict=True
        ):
            down = [F.pad(it.T, (0, BLOCK - len(it) % BLOCK)) for it in (of_out, x)]
            of_weight = rounded(down[0]) @ rounded(down[1]).T
            both = rounded(x) @ rounded(matrix).T, rounded(of_out) @ rounded(matrix.T).T
            results.append((*both, of_weight))
        outs, of_rows, of_weights = zip(*results, strict=True)
        return [torch.cat(outs), torch.cat(of_rows), torch.stack(of_weights)]

    assert found[2][1].count_nonzero() == 0
    for one, expected, exact in zip(
        found, products(round_rows), products(torch.Tensor.double), strict=True
    ):
        assert difference(one, expected) < 2**-8
        assert 0.01 < difference(one, exact) < 2**-4


def test_operations_return_what_the_compiler_expects() -> None:
    cpu_kernels.register()
    ends = torch.tensor([32, 32, 96], dtype=torch.int32)
    rows, weight = torch.randn(96, 64).bfloat16(), torch.randn(3, 32, 64).bfloat16()
    grad = torch.randn(96, 32).bfloat16()
    for recipe in ("mxfp8", "rowwise"):
        for operation, arguments in (
            (multiply_narrow, (recipe, ends, [rows] * 2, [weight] * 2)),
            (narrow_gradients, (recipe, ends, rows, [weight] * 2, [grad] * 2)),
        ):
            torch.library.opcheck(operation, arguments, test_utils="test_faketensor")


def test_kernels_round_scales_up() -> None:
    """`narrow_experts` calls them with their defaults."""
    grouped = pytest.importorskip("torchao.prototype.moe_training.mxfp8_grouped_mm")
    kernels = pytest.importorskip("torchao.prototype.mx_formats.kernels")
    for kernel in (
        kernels.mxfp8_quantize_cuda,
        grouped.triton_to_mxfp8_dim0,
        grouped.mxfp8_quantize_2d_1x32_cutedsl,
        grouped.mxfp8_quantize_cuda_3d,
    ):
        original = getattr(kernel, "args", [kernel])[0]  # without `cpu_kernels`
        original = getattr(original, "_init_fn", original)
        assert signature(original).parameters["scaling_mode"].default == "rceil"


@pytest.mark.parametrize("recipe", ["mxfp8", "rowwise"])
def test_kept_matrices_give_the_same_bits(recipe: str) -> None:
    cpu_kernels.register()
    ends = torch.tensor([32, 32, 96], dtype=torch.int32)
    rows = [torch.randn(96, 64).bfloat16().requires_grad_()] * 2
    weights = [torch.randn(3, 32, 64).bfloat16().requires_grad_() for _ in range(2)]
    grads = [torch.randn(96, 32).bfloat16() for _ in range(2)]
    results = []
    for kept in ([], cast_matrices(recipe, *weights)):
        out = multiply_narrow(recipe, ends, rows, weights + kept)
        results.append([*out, *torch.autograd.grad(out, [rows[0], *weights], grads)])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def job(folder: Path, stage: int = 0, micro_batch: int = 2, recipe: str | None = "mxfp8",
        shape: Model = SHAPE, compiled: bool = False, **degrees: Any) -> ResolvedConfig:  # fmt: skip
    row = Row("", degrees, stage, micro_batch, shape)
    config = row_config(folder, row, "bf16", steps=4)
    narrow = replace(config.precision, fp8=recipe is not None, fp8_recipe=recipe or "tensorwise")
    train, optimizer = replace(config.train, seq_len=SEQ), replace(config.optimizer, lr=1e-3)
    backend = replace(config.backend, compile="on" if compiled else "off")
    return replace(config, precision=narrow, train=train, optimizer=optimizer, backend=backend)


def losses(rank: int, config: ResolvedConfig) -> list[float]:
    cpu_kernels.register()
    return [record["loss"] for record in record_all(rank, config)]


def write_tokens(folder: Path) -> None:
    dice = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, SHAPE.vocab, (8 * SEQ + 1,), generator=dice)
    write_indexed(folder / "tokens", [tokens.numpy()])


LAYOUTS: dict[str, list[dict[str, Any]]] = {
    "usual": [{"dp": 2, "stage": 3}, {"tp": 2}, {"cp": 2}, {"pp": 2}],
    "others": [
        {"dp": 2},
        {"dp": 2, "stage": 1},
        {"dp": 2, "stage": 2, "activation_checkpointing": "full"},
        {"dp": 2, "stage": 3, "activation_checkpointing": "selective"},
        {"tp": 2, "sequence_parallel": False},
        {"cp": 2, "cp_method": "ulysses"},
        {"pp": 2, "schedule": "zero-bubble", "virtual_stages": 2, "micro_batch": 1},
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("rows", usual_rows(LAYOUTS, ["usual"]))
def test_layouts_train_the_same(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    """The losses of one process, which are not those in bf16."""
    write_tokens(tmp_path)
    deep = {"shape": replace(SHAPE, layers=4)}
    wide, alone = (losses(0, job(tmp_path, recipe=it, **deep)) for it in (None, "mxfp8"))
    for found in run_ranks(all_losses, 2, [job(tmp_path, **deep, **row) for row in rows])[0]:
        assert found == pytest.approx(alone, rel=0.02)
        assert found != wide
    assert alone != wide and alone == pytest.approx(wide, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "shape"),
    [
        ("mxfp8", MOE),
        ("tensorwise", MOE),
        exhaustive("mxfp8", SHARED),
        exhaustive("rowwise", SHARED),
    ],
)
def test_experts_train_the_same_on_two_ranks(tmp_path: Path, recipe: str, shape: Model) -> None:
    write_tokens(tmp_path)
    wide, alone = (losses(0, job(tmp_path, recipe=it, shape=shape)) for it in (None, recipe))
    mode = "activation_checkpointing"
    rows: list[dict[str, Any]] = [
        {"dp": 2, "stage": 3, mode: "full"}, {"dp": 2, "ep": 2, "stage": 1, mode: "selective"},
        {"dp": 2, "ep": 2, "stage": 3}, {"cp": 2}, {"pp": 2, "micro_batch": 1},
        {"tp": 2, mode: "selective", "selective_keep": "matmuls"},
        {"tp": 2, "ep": 2, "ep_over_tp": True},
    ]  # fmt: skip
    for row in rows:
        found, _ = run_ranks(losses, 2, job(tmp_path, recipe=recipe, shape=shape, **row))
        assert found == pytest.approx(alone, rel=0.02), row
        assert found != wide
    assert alone != wide and alone == pytest.approx(wide, rel=0.1)


@pytest.mark.slow
def test_kept_matrices_are_cast_again_after_an_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four micro batches of a step share them, also in recomputation, and losses do not change by a bit."""
    write_tokens(tmp_path)
    configs = [
        job(tmp_path, micro_batch=1, recipe="tensorwise", shape=MOE, **mode)
        for mode in ({}, {"activation_checkpointing": "full"})
    ]
    assert all(map(keeps_narrow_experts, configs))
    casts: list[int] = []

    def counted(recipe: str, *weights: Tensor) -> list[Tensor]:
        casts.append(len(weights))
        return cast_matrices(recipe, *weights)

    monkeypatch.setattr(moe, "cast_matrices", counted)
    kept = [losses(0, config) for config in configs]
    assert casts == [3] * (4 * MOE.layers * 2)  # steps, layers, modes
    monkeypatch.setattr(moe.Experts, "cast_once", lambda *_: None)
    assert kept == [losses(0, config) for config in configs]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["mxfp8", "tensorwise"])
def test_compiled_experts_train_the_same(tmp_path: Path, recipe: str) -> None:
    write_tokens(tmp_path)
    alone = losses(0, job(tmp_path, recipe=recipe, shape=MOE))
    compiled = job(tmp_path, recipe=recipe, shape=MOE, dp=2, ep=2, stage=3, compiled=True)
    assert run_ranks(losses, 2, compiled)[0] == pytest.approx(alone, rel=0.02)


def all_losses(rank: int, configs: list[ResolvedConfig]) -> list[list[float]]:
    return [losses(rank, config) for config in configs]
