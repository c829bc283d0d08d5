from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from nanoscale.backends import low_bits
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.schema import Model
from nanoscale.models.head import Head
from nanoscale.models.initialization import initialize
from nanoscale.models.transformer import Transformer
from nanoscale.parallel import narrow_gathers, process_group, tensor
from tests.backends.test_mxfp8 import job, write_tokens
from tests.support.layouts import record_all
from tests.support.ranks import run_ranks
from tests.support.rows import usual_rows

torchao = pytest.importorskip("torchao.float8.float8_linear", reason="pip install 'torchao>=0.15'")

SHAPE = Model(
    layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=128, vocab=96, init_std=0.2
)
PRODUCTS = 7  # wq wk wv wo gate up down
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def make(in_8_bits: str | None, mesh: DeviceMesh | None = None) -> Transformer:
    with torch.device("meta"):
        model = Transformer(SHAPE)
    if in_8_bits:
        low_bits.use_float8(model, in_8_bits, emulate=True)
    if mesh is not None:
        tensor.apply(model, mesh, sequence_parallel=True)
    model.to_empty(device="cpu")
    initialize(model, SHAPE, seed=1)
    return model.bfloat16()


def losses(model: Transformer, steps: int = 5) -> list[float]:
    tokens = torch.randint(0, SHAPE.vocab, (4, 33), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for _ in range(steps):
        loss = model(tokens[:, :-1], None, tokens[:, 1:]) / tokens[:, 1:].numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def in_8_bits(model: Transformer) -> list[str]:
    return [name for name, m in model.named_modules() if isinstance(m, torchao.Float8Linear)]


def test_blocks_multiply_in_8_bits() -> None:
    model = make(in_8_bits="tensorwise")
    linear = in_8_bits(model)
    assert len(linear) == PRODUCTS * SHAPE.layers
    assert all(name.startswith("layers.") for name in linear)
    assert type(model.head) is Head
    plain = {name: p.shape for name, p in make(in_8_bits=None).named_parameters()}
    assert {name: p.shape for name, p in model.named_parameters()} == plain


def test_loss_follows_bf16() -> None:
    sixteen = losses(make(in_8_bits=None))
    found = {recipe: losses(make(in_8_bits=recipe)) for recipe in RECIPES}
    for eight in found.values():
        assert eight == pytest.approx(sixteen, rel=0.1)
        assert all(a != b for a, b in zip(eight, sixteen, strict=True))
        assert eight[-1] < 0.95 * eight[0]
    assert len({tuple(eight) for eight in found.values()}) == len(RECIPES)


def test_tensor_parallel_ranks_scale_their_shards() -> None:
    """One process computes the same products of whole rows, bit for bit, and almost the same losses."""
    expected, reference = queries(make("rowwise")), losses(make("rowwise"))
    assert not torch.equal(expected, queries(make(None)))
    ranks = run_ranks(train_divided, 2)
    assert torch.equal(torch.cat([of_rank for of_rank, _ in ranks], dim=-1), expected)
    for _, found in ranks:
        assert found == pytest.approx(reference, rel=0.02)
        assert found != reference


def train_divided(rank: int) -> tuple[torch.Tensor, list[float]]:
    process_group.join(2, torch.device("cpu"), 120.0)
    model = make("rowwise", init_device_mesh("cpu", (2,)))
    return queries(model), losses(model)


@torch.no_grad()
def queries(model: Transformer) -> torch.Tensor:
    """Return the queries of the first block, of some tokens and this rank's heads."""
    results: list[torch.Tensor] = []
    query = model.layers["0"].get_submodule("attention.wq")
    hook = query.register_forward_hook(lambda _, __, result: results.append(result))
    model(torch.arange(32).view(1, 32))
    hook.remove()
    return results[0]


@pytest.mark.parametrize(
    ("recipe", "kept"),
    [("tensorwise", "wk wv"), ("rowwise", "wq wk wv wo down"), (RECIPES[2], "wq wk wv wo down")],
)
def test_matrices_that_would_be_slower_stay_as_they_are(recipe: str, kept: str) -> None:
    """The matrices are Llama 3.2 1B's, by torchao's own choice."""
    shape = Model(layers=1, hidden=2048, heads=32, kv_heads=8, head_dim=64, ffn=8192, vocab=96)
    with torch.device("meta"):
        model = Transformer(shape)
    low_bits.use_float8(model, recipe, emulate=True)
    products = [m for m in model.layers.modules() if isinstance(m, torch.nn.Linear)]
    assert len(in_8_bits(model)) == len(products) - len(kept.split())
    assert not any(name.endswith(tuple(kept.split())) for name in in_8_bits(model))


Trained = list[tuple[float, float]]
"""Loss and norm of the gradients of each step."""


def trained(rank: int, config: ResolvedConfig) -> Trained:
    return [(record["loss"], record["grad_norm"]) for record in record_all(rank, config)]


def in_8_and_in_16_bits(rank: int, configs: list[ResolvedConfig]) -> list[tuple[Trained, Trained]]:
    """Train with gathers in 8 bits, then with gathers in 16 bits."""
    return [in_both(rank, config) for config in configs]


def in_both(rank: int, config: ResolvedConfig) -> tuple[Trained, Trained]:
    with pytest.MonkeyPatch.context() as patch:
        cast, extend = list[None](), narrow_gathers._extend
        patch.setattr(narrow_gathers, "_extend", lambda *it: cast.append(extend(*it)))
        narrow = trained(rank, config)
        assert len(cast) == len(narrow) * config.model.layers * PRODUCTS * gathers(config)
        gc.collect()  # shards with functions that hold them would stay
        assert not any(
            "fsdp_pre_all_gather" in vars(it) for it in gc.get_objects() if type(it) is torch.Tensor
        )
        patch.setattr(narrow_gathers, "prepare", lambda *_: None)
        return narrow, trained(rank, config)


def gathers(config: ResolvedConfig) -> float:
    """Return the passes of a step in which a rank casts each of its blocks."""
    micro_batches = config.train.global_batch // config.train.micro_batch // config.parallel.dp
    each = config.zero.stage == 3 and config.parallel.pp == 1
    return (micro_batches if each else 1) / config.parallel.pp


LAYOUTS: dict[str, list[dict[str, Any]]] = {
    "2 ranks": [{"dp": 2, "stage": 3}, {"dp": 2, "stage": 1}],
    "4 ranks": [
        {"dp": 2, "tp": 2, "stage": 3, "activation_checkpointing": "full"},
        {"dp": 2, "pp": 2, "stage": 1},
        {"dp": 4, "dp_replicate": 2, "stage": 3, "micro_batch": 1},
        {"dp": 2, "cp": 2, "stage": 2},
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("rows", usual_rows(LAYOUTS, ["2 ranks"]))
def test_gathers_in_8_bits_change_no_number(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    write_tokens(tmp_path)
    shape = replace(SHAPE, layers=4, kv_heads=4, ffn=126)  # 126 rows over 4 ranks are padded
    configs = [job(tmp_path, recipe="tensorwise", shape=shape, **row) for row in rows]
    for narrow, wide in run_ranks(in_8_and_in_16_bits, configs[0].world_size, configs)[0]:
        assert narrow == wide
