"""The activations that each mode of checkpointing keeps and recomputes; the gradients are unchanged."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from nanoscale.config.schema import Model, Parallel
from nanoscale.models.moe import is_recomputed, multiply_by_expert
from nanoscale.models.rope import rope_rotation
from nanoscale.models.transformer import Block, Rotations, RunLayers, run_layers
from nanoscale.parallel import activation, process_group
from nanoscale.parallel.context import UlyssesAttention
from nanoscale.parallel.expert import BlockInParts, exchange_counts
from nanoscale.parallel.sequence_parallel import ResidualStream
from nanoscale.parallel.tensor import divide_block
from tests.support.ranks import run_ranks

LAYERS, BATCH, SEQ = 8, 16, 16
SHAPE = Model(layers=LAYERS, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=64, vocab=64)
MATMULS_A_BLOCK = 7  # wq wk wv wo gate up down
HIDDEN = BATCH * SEQ * SHAPE.hidden * 8
"""Bytes of the residual stream in fp64, the unit of the measurements."""

MODES = {
    "none": {},
    "full": {"activation_checkpointing": "full"},
    "full, every 3rd": {"activation_checkpointing": "full", "checkpoint_every": 3},
    "attention": {"activation_checkpointing": "selective", "selective_keep": "attention"},
    "core": {"activation_checkpointing": "selective", "selective_keep": "core-attention"},
    "matmuls": {"activation_checkpointing": "selective", "selective_keep": "matmuls"},
    "matmuls, every 3rd block": {"activation_checkpointing": "selective", "checkpoint_every": 3},
    "every 2nd": {"activation_checkpointing": "selective", "selective_keep": "every-2nd-matmul"},
}
RECOMPUTED = {
    "none": 0,
    "full, every 3rd": 3,
    "matmuls, every 3rd block": 3,
}  # blocks; the others all of them


@dataclass
class Seen:
    """One forward and backward pass of a stack of blocks, in fp64."""

    gradients: list[Tensor]
    kept: float
    """Memory kept after the forward pass, its output included, in residual streams."""
    peak: float
    """Most memory at once, in residual streams."""
    operations: Counter[str]
    blocks: int
    """Times that a block was called."""


class CountOperations(TorchDispatchMode):
    """A counter of operations that really run: operations that other modes answer do not reach it."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


def make(mode: str, offload: bool = False, shape: Model = SHAPE) -> tuple[nn.ModuleDict, RunLayers]:
    torch.manual_seed(0)
    layers = nn.ModuleDict({str(i): Block(shape, i) for i in range(LAYERS)}).double()
    parallel = replace(Parallel(), offload_activations=offload, **MODES[mode])
    activation.apply(layers, parallel)
    return layers, activation.make_run_layers(parallel, run_layers)


def inputs(batch: int = BATCH) -> tuple[Tensor, Rotations]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(batch, SEQ, SHAPE.hidden, dtype=torch.float64, generator=generator)
    rotation = rope_rotation(SHAPE, torch.arange(SEQ), torch.float64, SEQ)
    return hidden.requires_grad_(), (rotation, rotation)


@cache
def see(mode: str, offload: bool = False) -> Seen:
    layers, run = make(mode, offload)
    calls: list[nn.Module] = []
    for block in layers.values():
        block.attention.register_forward_hook(lambda module, *_: calls.append(module))
    hidden, rotations = inputs()
    counter = CountOperations()
    gc.collect()  # or what earlier tests left would be freed, and counted, at any time
    with counter, profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        output = run(layers, hidden, rotations, (None, None))
        with record_function("backward"):
            output.square().sum().backward()
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    start = next(i for i, event in enumerate(events) if event.name() == "backward")
    # The number means bytes only for events of memory.
    levels = [*accumulate(e.nbytes() if e.name() == "[memory]" else 0 for e in events)]
    return Seen(
        gradients=[hidden.grad, *(p.grad for p in layers.parameters())],  # type: ignore[list-item]
        kept=levels[start] / HIDDEN,
        peak=max(levels) / HIDDEN,
        operations=counter.counts,
        blocks=len(calls),
    )


@pytest.mark.slow
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_bitwise_the_same(mode: str, offload: bool) -> None:
    expected, found = see("none").gradients, see(mode, offload).gradients
    assert len(found) == 1 + 9 * LAYERS
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_blocks_are_computed_again(mode: str, offload: bool) -> None:
    assert see(mode, offload).blocks == LAYERS + RECOMPUTED.get(mode, LAYERS)


@pytest.mark.slow
def test_kept_memory_has_its_closed_form() -> None:
    """The unit is the residual stream. All of the blocks' inputs but the first are kept, and the last
    output."""
    kv = SHAPE.kv_heads / SHAPE.heads
    attention = 1 + 1 / SHAPE.head_dim  # its result and each head's and position's logarithm
    products = [1, kv, kv, 1, 2, 2, 1]  # wq wk wv wo gate up down
    every_2nd = sum(product for i, product in enumerate(products * LAYERS) if i % 7 % 2 == 1)
    expected = {
        "full": LAYERS,
        "attention": LAYERS * (1 + attention),
        "matmuls": LAYERS * (1 + attention + sum(products)),
        "every 2nd": LAYERS * (1 + attention) + every_2nd,
    }
    assert {mode: see(mode).kept for mode in expected} == pytest.approx(expected, rel=1e-3)
    order = ["none", "matmuls", "every 2nd", "attention", "full"]
    kept = [see(mode).kept for mode in order]
    assert kept == sorted(kept, reverse=True) and len(set(kept)) == len(order)


@pytest.mark.slow
def test_peak_memory_falls() -> None:
    peak = {mode: see(mode).peak for mode in MODES}
    assert peak["none"] > peak["matmuls"] > peak["every 2nd"] > peak["attention"] > peak["full"]


@pytest.mark.parametrize("offload", [False, True])
def test_operations_computed_again(offload: bool) -> None:
    """The last product of a block is never needed again: recomputation stops before it."""
    kernel = "aten::_scaled_dot_product_flash_attention_for_cpu"
    once = see("none").operations
    again = {
        mode: (seen.operations["aten::mm"] - once["aten::mm"], seen.operations[kernel])
        for mode in MODES
        if (seen := see(mode, offload))
    }
    needed = (MATMULS_A_BLOCK - 1) * LAYERS
    assert once[kernel] == LAYERS
    assert again == {
        "none": (0, LAYERS),
        "full": (needed, 2 * LAYERS),
        "full, every 3rd": ((MATMULS_A_BLOCK - 1) * 3, LAYERS + 3),
        "attention": (needed, LAYERS),
        "core": (needed, LAYERS),
        "matmuls": (0, LAYERS),
        "matmuls, every 3rd block": (0, LAYERS),
        "every 2nd": ((MATMULS_A_BLOCK - 3 - 1) * LAYERS, LAYERS),  # wq wv gate of those needed
    }


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "none"])
def test_no_token_is_routed_otherwise_the_second_time(mode: str, offload: bool) -> None:
    """The recomputed input of a router is another one here, as rounding may make it."""
    shape = replace(SHAPE, experts=8, experts_per_token=2)
    layers, run = make(mode, offload, shape)
    chosen: dict[nn.Module, list[Tensor]] = {}

    noise = torch.randn(BATCH, SEQ, SHAPE.hidden, dtype=torch.float64)

    def disturb(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        return (inputs[0] + is_recomputed() * noise,)

    def note(router: nn.Module, _: Any, output: tuple[Tensor, Tensor]) -> None:
        chosen.setdefault(router, []).append(output[1])

    for block in layers.values():
        block.mlp.router.register_forward_pre_hook(disturb)
        block.mlp.router.register_forward_hook(note)
    hidden, rotations = inputs()
    for _ in range(2):  # routings of one step are not those of the next
        chosen.clear()
        run(layers, hidden, rotations, (None, None)).square().sum().backward()
        again = [both for both in chosen.values() if len(both) == 2]
        assert len(again) == RECOMPUTED.get(mode, LAYERS)
        assert sum(int((first != second).sum()) for first, second in again) == 0


class Stack(nn.Module):
    """Blocks as they stand in the model: FSDP2's root module is around them."""

    def __init__(self, layers: nn.ModuleDict, run: RunLayers) -> None:
        super().__init__()
        self.layers, self.run = layers, run

    def forward(self, hidden: Tensor, rotations: Rotations) -> Tensor:
        return self.run(self.layers, hidden, rotations, (None, None))


ROWS = 3  # no activation of so many has a parameter's size


def two_steps(model: nn.Module) -> list[Tensor]:
    """Return the whole parameters after two updates: the second would show stale weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(2):
        model(*inputs(batch=ROWS)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in model.parameters()]


Case = tuple[str, bool]  # mode, offload


def step_in_layout(rank: int, layout: str, cases: list[Case]) -> dict[Case, dict[str, Any]]:
    process_group.join(2, torch.device("cpu"), 120.0)
    mesh = init_device_mesh("cpu", (2,))
    expected = two_steps(Stack(*make("none")))
    found = {}
    for mode, offload in cases:
        model = Stack(*make(mode, offload))
        for block in model.layers.values():
            if layout == "fsdp":
                fully_shard(block, mesh=mesh, reshard_after_forward=True)
            else:
                divide_block(block, mesh, ResidualStream.on_mesh(mesh, divided=False))
        if layout == "fsdp":
            fully_shard(model, mesh=mesh)
        with CountOperations() as counter, measure_moves() as moved:
            parameters = two_steps(model)
        found[mode, offload] = {
            "worst": max(
                (a - b).abs().max().item() for a, b in zip(parameters, expected, strict=True)
            ),
            "moved": sum(moved) / 2 / (HIDDEN / BATCH * ROWS),
            "parameters moved": {own_bytes(p) for p in model.parameters()} & set(moved),
            "counts": counter.counts,
        }
    process_group.leave()
    return found


def own_bytes(parameter: Tensor) -> int:
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).nbytes


@contextmanager
def measure_moves() -> Iterator[list[int]]:
    """Provide the bytes of each storage that moves to host memory."""
    sizes: list[int] = []
    move = activation.HostStorage.__init__

    def measured(self: activation.HostStorage, storage: torch.UntypedStorage) -> None:
        sizes.append(storage.nbytes())
        move(self, storage)

    with patch.object(activation.HostStorage, "__init__", measured):
        yield sizes


CASES = [("none", True), *((m, o) for m in ("full", "matmuls") for o in (False, True))]


@pytest.mark.slow
def test_blocks_in_shards() -> None:
    """FSDP2 is around recomputed regions: nothing is stale, nothing is gathered more often."""
    for found in run_ranks(step_in_layout, 2, "fsdp", CASES):
        for seen in found.values():
            assert seen["worst"] == 0  # two ranks with the same data: their mean is exact
            assert seen["counts"]["c10d::_allgather_base_"] == 2 * 2 * LAYERS
            assert seen["counts"]["c10d::_reduce_scatter_base_"] == 2 * LAYERS
        for mode in ("full", "matmuls"):  # parameters are not among it
            assert found[mode, True]["moved"] == pytest.approx(see(mode).kept, rel=1e-3)


@pytest.mark.slow
def test_blocks_in_tensor_parallel() -> None:
    """Products are kept and moved, and parts of weights are not; reduced results are not reduced again."""
    for found in run_ranks(step_in_layout, 2, "tp", CASES):
        for seen in found.values():
            assert seen["worst"] < 1e-15
            assert not seen["parameters moved"]
        reductions = {mode: found[mode, True]["counts"][ALL_REDUCE] for mode in MODES_HERE}
        once = 2 * LAYERS * (2 + 2)  # a step: after attention and feed-forward, and before them
        again = {"none": 0, "full": 2 * LAYERS, "matmuls": 0}
        assert reductions == {mode: once + more for mode, more in again.items()}


def moved_with_frozen_weights(rank: int) -> tuple[list[int], list[int]]:
    """Return the sizes of this rank's weights, and of what moves to the host in two micro batches."""
    process_group.join(2, torch.device("cpu"), 120.0)
    mesh = init_device_mesh("cpu", (2,))
    model = Stack(*make("none", offload=True))
    for block in model.layers.values():
        divide_block(block, mesh, ResidualStream.on_mesh(mesh, divided=False))
    model.requires_grad_(False)  # as with adapters, which are attached to divided layers
    with measure_moves() as moved:
        for _ in range(2):
            model(*inputs(batch=ROWS)).square().mean().backward()
    process_group.leave()
    return [own_bytes(p) for p in model.parameters()], moved


def test_frozen_weights_in_tensor_parallel_do_not_move() -> None:
    for weights, moved in run_ranks(moved_with_frozen_weights, 2):
        assert moved
        assert sum(size for size in moved if size in weights) == 0


ALL_REDUCE = "_c10d_functional::all_reduce"
MODES_HERE = ("none", "full", "matmuls")


@pytest.mark.parametrize("mode", MODES)
def test_what_moves_to_the_host(mode: str) -> None:
    """All kept tensors move, but no parameters, and inputs of several products only once."""
    with measure_moves() as moved:
        see.__wrapped__(mode, True)
    # The last output is kept by its user and the first input by who made it.
    assert sum(moved) / HIDDEN == pytest.approx(see(mode).kept, rel=1e-3)


def test_autocast_copies_of_weights_do_not_move() -> None:
    layers, run = make("none", offload=True)
    hidden, rotations = inputs(batch=7)  # no activation has a weight's size
    with measure_moves() as moved, torch.autocast("cpu", torch.bfloat16):
        run(layers.float(), hidden.float(), rotations, (None, None))
    weights = {p.numel() * 2 for p in layers.parameters() if p.ndim > 1}
    assert moved and not weights & set(moved)


def test_names_stay() -> None:
    names = [name for name, _ in make("none")[0].named_modules()]
    for mode in MODES:
        assert [name for name, _ in make(mode)[0].named_modules()] == names


def test_describe() -> None:
    assert activation.describe(Parallel()) == "everything kept for the backward pass"
    mode = Parallel(activation_checkpointing="full", checkpoint_every=2, offload_activations=True)
    assert activation.describe(mode) == (
        "one block in 2 recomputed, saved activations wait in host memory"
    )


def test_selective_keeps_the_products_of_experts_in_both_halves_of_a_batch() -> None:
    """Gate and up of each half, and the rows that arrive; neither down nor what returns to the tokens."""
    exchange = torch.ops._c10d_functional.all_to_all_single.default
    counts, matmul = exchange_counts._opoverload, multiply_by_expert._opoverload
    send, compute = [counts, exchange, exchange], [matmul, matmul, matmul, exchange]
    policy = activation.SavePolicy("matmuls")
    assert [policy(it) for it in send + send] == 6 * [True]
    assert [policy(it) for it in compute + compute] == 2 * [True, True, False, False]
    assert activation.SavePolicy("matmuls")(exchange)  # of Ulysses, whose block routes later


def exchange_alone(rank: int, shape: Model) -> dict[str, tuple[list[Tensor], tuple[int, ...]]]:
    """Return the gradients of a step in halves with ep and ulysses, in groups of one rank, and how many
    exchanges, products and products of experts it runs."""
    process_group.join(1, torch.device("cpu"), 120.0, even_alone=True)
    group: Any = torch.distributed.group.WORLD
    seen = {}
    for mode in ("none", "full", "attention", "matmuls"):
        torch.manual_seed(0)
        layers: Any = nn.ModuleDict({"0": Block(shape, 0), "1": Block(shape, 1)}).double()
        for parameter in layers.parameters():
            nn.init.normal_(parameter, std=0.1)
        for block in layers.values():
            block.attention.core = UlyssesAttention(group, shape)
            block.forward = block.parts = BlockInParts(block, group, None)
        activation.apply(layers, replace(Parallel(), **MODES[mode]))
        hidden, rotations = inputs(batch=2)
        with CountOperations() as counter:
            run_layers(layers, hidden, rotations, (None, None)).square().sum().backward()
        grads: Any = [hidden.grad, *(p.grad for p in layers.parameters())]
        names = "_c10d_functional::all_to_all_single", "aten::mm", "nanoscale::multiply_by_expert"
        seen[mode] = grads, tuple(counter.counts[name] for name in names)
    process_group.leave()
    return seen


@pytest.mark.parametrize("norm", ["before", "both"])
def test_exchanges_and_products_that_recomputation_repeats(norm: Any) -> None:
    """Four exchanges of ulysses, and two of tokens to their experts, in each half. `selective` keeps all of
    them, and nothing reads what comes back from the experts, except a norm after them. Sums save the tokens
    of rows, so recomputation of experts ends after their last product."""
    shape = replace(SHAPE, experts=4, experts_per_token=2, norm_position=norm)
    [seen] = run_ranks(exchange_alone, 1, shape)
    expected, once = seen.pop("none")
    assert once[::2] == (2 * 2 * 2 * (4 + 3), 2 * 2 * 2 * 3)  # blocks, halves, passes
    repeated = {
        mode: [(b - a) / (2 * 2) for a, b in zip(once, counts, strict=True)]
        for mode, (_, counts) in seen.items()
    }
    before = norm == "before"
    # Attention's output is the last product of a part, which a norm alone reads.
    assert repeated == {
        "full": [6 if before else 7, 4, 3],
        "attention": [0, 3 if before else 4, 3],
        "matmuls": [0, 0, 1],
    }
    for gradients, _ in seen.values():
        assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
