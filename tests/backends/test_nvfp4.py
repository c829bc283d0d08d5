"""Products in NVFP4: torchao's own layer with kernels that are registered for the CPU, and layouts of a job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.gpu import cpu_kernels, cpu_nvfp4
from nanoscale.backends import low_bits
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.models.moe import Experts
from nanoscale.models.transformer import Transformer
from tests.backends import test_mxfp8
from tests.backends.test_mxfp8 import difference
from tests.support.layouts import record_all
from tests.support.ranks import run_ranks
from tests.support.rows import usual_rows
from tests.support.token_files import write_indexed

pytest.importorskip(
    "torchao.prototype.moe_training.nvfp4_training", reason="pip install 'torchao>=0.18'"
)

BLOCK, LARGEST = 16, 6
"""Numbers with one scale, and e2m1's largest number."""
GRID = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
TO_EVEN = 1e-9 * torch.tensor([0, 1] * 4)
"""Added to distances: the number with an even code is nearer if two are equally near."""
SEQ = 256
SHAPE = replace(test_mxfp8.SHAPE, hidden=128, head_dim=64, ffn=256, init_std=0.06, max_seq_len=SEQ)
MOE = replace(SHAPE, experts=4, experts_per_token=2, ffn=128)


def in_nvfp4(x: Tensor, tiles: bool = False) -> Tensor:
    """Round the rows of `x` to NVFP4, in fp64, with a scale for 16 numbers or for tiles of 16 rows."""
    x = x.double()
    blocks = x.unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1)
    if tiles:
        of_tiles = largest.unflatten(0, (-1, BLOCK)).amax(1)
        largest = of_tiles.repeat_interleave(BLOCK, 0)
    factor = 448 * LARGEST / x.abs().max()
    scales = (largest / LARGEST * factor).float().to(torch.float8_e4m3fn).double() / factor
    scaled = blocks / torch.where(scales == 0, 1.0, scales).unsqueeze(-1)
    distances = (scaled.abs().clamp(max=LARGEST).unsqueeze(-1) - GRID).abs() + TO_EVEN
    return (GRID[distances.argmin(-1)].copysign(scaled) * scales.unsqueeze(-1)).flatten(-2)


def transformed(x: Tensor) -> Tensor:
    """Return the product of each 16 rows with the orthogonal matrix of signs and Sylvester's construction."""
    sylvester = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(4):
        sylvester = torch.cat(
            (torch.cat((sylvester, sylvester), 1), torch.cat((sylvester, -sylvester), 1))
        )
    matrix = torch.tensor(low_bits._SIGNS).unsqueeze(1) * sylvester / 4
    return (x.T.double().unflatten(1, (-1, BLOCK)) @ matrix).flatten(1).T


def layer_and_tensors() -> tuple[nn.Linear, Tensor, Tensor]:
    cpu_nvfp4.register()
    dice = torch.Generator().manual_seed(1)
    layer = nn.Linear(256, 384, bias=False, dtype=torch.bfloat16)
    layer.weight.data = torch.randn(384, 256, generator=dice).bfloat16()
    low_bits.to_nvfp4([layer])
    x = torch.randn(2, 128, 256, generator=dice).bfloat16()
    x[0, 0, 0] = 300.0  # an outlier costs the numbers of its block
    grad = (1e-4 * torch.randn(2, 128, 384, generator=dice)).bfloat16()
    return layer, x.requires_grad_(), grad


def gradients(layer: Any, x: Tensor, grad: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    of_x, of_weight = torch.autograd.grad(layer(x), [x, layer.weight], grad)
    return of_x.flatten(0, 1), of_weight


def test_the_three_products_of_a_layer_round_what_they_sum() -> None:
    """Random rounding has the mean of the exact gradients, with the other operand rounded to the nearest."""
    layer, x, grad = layer_and_tensors()
    rows, of_out, weight = x.detach().flatten(0, 1), grad.flatten(0, 1).double(), layer.weight.data
    exact = rows.double() @ weight.double().T, of_out @ weight.double(), of_out.T @ rows.double()
    out = layer(x).detach().flatten(0, 1)
    assert difference(out, in_nvfp4(rows) @ in_nvfp4(weight, tiles=True).T) < 2**-7  # ties
    drawn = [gradients(layer, x, grad, seed) for seed in range(64)]
    of_rows = of_out @ in_nvfp4(weight, tiles=True)
    of_weight = transformed(of_out).T @ in_nvfp4(transformed(rows).T).T
    for results, mean in zip(zip(*drawn, strict=True), (of_rows, of_weight), strict=True):
        alone = difference(results[0], mean)
        together = difference(torch.stack(results).double().mean(0), mean)
        assert 0.05 < alone < 0.2 and together < alone / 5
    for found, expected in zip((out, *drawn[0]), exact, strict=True):
        assert 0.05 < difference(found, expected) < 0.25


@pytest.mark.parametrize("compiled", [False, True])
def test_a_seed_decides_the_rounding(compiled: bool) -> None:
    layer, x, grad = layer_and_tensors()
    act = torch.compile(layer, fullgraph=True) if compiled else layer
    first, again, other = (gradients(act, x, grad, seed) for seed in (1, 1, 2))
    for one, same, another in zip(first, again, other, strict=True):
        assert torch.equal(one, same) and 0.01 < difference(another, one.double()) < 0.25


def test_names_head_and_last_blocks_stay() -> None:
    for shape in (SHAPE, replace(SHAPE, bias=True), MOE):
        with torch.device("meta"):
            model, plain = (Transformer(replace(shape, layers=7)) for _ in range(2))
        low_bits.use_float8(model, "nvfp4")
        named = model.named_modules()
        of = [name for name, it in named if isinstance(it, low_bits.NVFP4Linear)]
        assert {name.split(".")[1] for name in of} == set("01234")
        assert len(of) == (4 if shape.experts else 7) * 5
        recipes = [it.recipe for it in model.modules() if isinstance(it, Experts)]
        assert recipes == (["mxfp8"] * 5 + [""] * 2 if shape.experts else [])
        names = ({name: it.shape for name, it in m.named_parameters()} for m in (model, plain))
        assert next(names) == next(names)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_the_first_block_is_narrow(layers: int) -> None:
    with torch.device("meta"):
        model = Transformer(replace(SHAPE, layers=layers))
    low_bits.use_float8(model, "nvfp4")
    assert isinstance(model.layers["0"].get_submodule("mlp.gate"), low_bits.NVFP4Linear)


def job(folder: Path, recipe: str | None = "nvfp4", **settings: Any) -> ResolvedConfig:
    config = test_mxfp8.job(folder, recipe=recipe, **{"shape": SHAPE, **settings})
    return replace(config, train=replace(config.train, seq_len=SEQ, steps=3))


def losses(rank: int, config: ResolvedConfig) -> list[float]:
    cpu_kernels.register()
    cpu_nvfp4.register()
    return [record["loss"] for record in record_all(rank, config)]


def all_losses(rank: int, configs: list[ResolvedConfig]) -> list[list[float]]:
    return [losses(rank, config) for config in configs]


def write_tokens(folder: Path) -> None:
    dice = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, SHAPE.vocab, (8 * SEQ + 1,), generator=dice)
    write_indexed(folder / "tokens", [tokens.numpy()])


@pytest.mark.slow
def test_a_step_repeats(tmp_path: Path) -> None:
    """The second run begins with another state of the generator."""
    write_tokens(tmp_path)
    first, second, other = (
        losses(0, replace(it, train=replace(it.train, seed=seed)))
        for seed in (1, 1, 2)
        for it in (job(tmp_path),)
    )
    assert first == second != other


LAYOUTS: dict[str, list[dict[str, Any]]] = {
    "usual": [{"dp": 2, "stage": 3}, {"tp": 2}],
    "long": [{"cp": 2}, {"pp": 2}],
    "stages of ZeRO": [
        {"dp": 2},
        {"dp": 2, "stage": 1},
        {"dp": 2, "stage": 2, "activation_checkpointing": "full"},
    ],
    "selective": [
        {"dp": 2, "stage": 3, "activation_checkpointing": "selective"},
        {"tp": 2, "sequence_parallel": False, "activation_checkpointing": "selective",
         "selective_keep": "matmuls"},
    ],
    "more": [
        {"cp": 2, "cp_method": "ulysses"},
        {"pp": 2, "schedule": "zero-bubble", "virtual_stages": 2, "micro_batch": 1},
        {"dp": 2, "stage": 2, "compiled": True},
    ],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("rows", usual_rows(LAYOUTS, ["usual"]))
def test_layouts_train_the_same(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    """The losses of one process, which are not those in bf16, but for the rounding of gradients."""
    write_tokens(tmp_path)
    deep = {"shape": replace(SHAPE, layers=4)}
    wide, alone = (losses(0, job(tmp_path, recipe=it, **deep)) for it in (None, "nvfp4"))
    for found in run_ranks(all_losses, 2, [job(tmp_path, **deep, **row) for row in rows])[0]:
        assert found == pytest.approx(alone, rel=0.02)
        assert found != wide
    assert alone != wide and alone == pytest.approx(wide, rel=0.1)


@pytest.mark.slow
def test_experts_train_the_same_on_two_ranks(tmp_path: Path) -> None:
    write_tokens(tmp_path)
    settings: dict[str, Any] = {"shape": MOE}
    wide, alone = (losses(0, job(tmp_path, recipe=it, **settings)) for it in (None, "nvfp4"))
    rows = [{"dp": 2, "ep": 2, "stage": 3, "activation_checkpointing": "full"}, {"cp": 2}]
    for found in run_ranks(all_losses, 2, [job(tmp_path, **settings, **row) for row in rows])[0]:
        assert found == pytest.approx(alone, rel=0.02)
        assert found != wide
    assert alone != wide and alone == pytest.approx(wide, rel=0.1)
