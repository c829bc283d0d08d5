"""Compiled blocks with the inductor backend, as on a GPU: it writes C++ here."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import Mock, patch

import pytest
import torch
import torch._inductor.config
import torch.distributed._symmetric_memory as symmetric
from functorch.compile import make_boxed_func
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters, detect_fake_mode
from torch._inductor.compile_fx import compile_fx
from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
from torch._inductor.virtualized import V
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from nanoscale.config.schema import Backend, Config, Model, Parallel
from nanoscale.data.batch import Batch
from nanoscale.models.rope import rope_rotation
from nanoscale.models.transformer import Block, Masks, Rotations, RunLayers, run_layers
from nanoscale.parallel import activation, compile, expert, process_group
from nanoscale.parallel.expert import exchange_counts
from nanoscale.parallel.joined_products import JoinProducts
from nanoscale.parallel.mesh import ExpertLayout
from nanoscale.parallel.sequence_parallel import ResidualStream
from nanoscale.parallel.tensor import divide_block
from nanoscale.train.job import make_engine
from tests.support.measured_memory import MIXTURE, Row, config_of, recomputed
from tests.support.ranks import run_ranks
from tests.support.rows import exhaustive

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None, reason="needs a C++ compiler: apt-get install g++"
)
LAYERS = 3  # each block compiled for itself would be three graphs
SHAPE = Model(layers=LAYERS, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=64)
MODES = {
    "none": {},
    "full": {"activation_checkpointing": "full"},
    "matmuls": {"activation_checkpointing": "selective"},
}


def make(
    mode: str, compiled: str, divide: Callable[[Block], None] | None = None
) -> tuple[nn.ModuleDict, RunLayers]:
    torch.manual_seed(0)
    layers = nn.ModuleDict({str(i): Block(SHAPE, i) for i in range(LAYERS)})
    parallel = Parallel(**MODES[mode])
    if divide is not None:
        for block in layers.values():
            divide(block)
    activation.apply(layers, parallel)
    compile.apply(layers, replace(Config(), backend=Backend(compile=compiled)))  # type: ignore[arg-type]
    return layers, activation.make_run_layers(parallel, run_layers)


def gradients(
    layers: nn.ModuleDict, run: RunLayers, dtype: torch.dtype = torch.float32, shards: int = 1
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, 16 // shards, 32, generator=generator, dtype=dtype).requires_grad_()
    rotation = rope_rotation(SHAPE, torch.arange(16), dtype, 16)
    output = run(layers, hidden, (rotation, rotation), (None, None))
    output.square().mean().backward()
    grads = [hidden.grad, *(p.grad for p in layers.parameters())]
    return [output.detach(), *(grad for grad in grads if grad is not None)]


def largest_difference(first: list[Tensor], second: list[Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(first, second, strict=True))


def with_backend(backend: str | Callable[..., Any]) -> Any:
    return patch.object(torch, "compile", partial(torch.compile, backend=backend))


def passes_alone(graph: fx.GraphModule, inputs: list[Tensor], **options: Any) -> Any:
    """Apply inductor's passes, and run the operations one by one: writing code takes a minute."""
    view_to_reshape(graph)
    with V.set_fake_mode(detect_fake_mode(inputs)):
        post_grad_passes(graph, bool(options.get("is_inference")))
    graph.recompile()
    return make_boxed_func(graph.forward)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "backend"),
    # The other backend does all but write code, which takes seconds for each.
    [
        ("none", "aot_eager"),
        ("full", "aot_eager"),
        exhaustive("full", "inductor"),
        exhaustive("matmuls", "inductor"),
    ],
)
def test_compiled_blocks_give_the_same(mode: str, backend: str) -> None:
    expected = gradients(*make("none", "off"))
    torch._dynamo.reset()
    counters.clear()
    with with_backend(backend):
        layers, run = make(mode, "on")
    assert largest_difference(gradients(layers, run), expected) < 1e-5
    assert counters["stats"]["unique_graphs"] == 1, "one for all blocks"
    assert not counters["graph_break"]
    names = [name for name, _ in make("none", "off")[0].named_modules()]
    assert [name for name, _ in layers.named_modules()] == names


def test_off_compiles_nothing() -> None:
    counters.clear()
    gradients(*make("full", "off"))
    assert not counters["stats"]


class Stack(nn.Module):
    def __init__(self, layers: nn.ModuleDict, run: RunLayers) -> None:
        super().__init__()
        self.layers, self.run = layers, run

    def forward(self, hidden: Tensor, rotations: Rotations, masks: Masks) -> Tensor:
        return self.run(self.layers, hidden, rotations, masks)


def compile_in_shards(rank: int) -> dict[str, tuple[float, tuple[int, int]]]:
    process_group.join(2, torch.device("cpu"), 120.0)
    expected = gradients(*make("none", "off"))
    found = {}
    for axis, sizes in {"dp": (2, 1), "tp": (1, 2)}.items():
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
        divide = partial(
            divide_block, mesh=mesh["tp"], stream=ResidualStream.on_mesh(mesh["tp"], False)
        )
        torch._dynamo.reset()
        counters.clear()
        with with_backend("aot_eager"):
            layers, run = make("full", "on", divide if axis == "tp" else None)
        model = Stack(layers, run)
        for module in (*layers.values(), model):
            fully_shard(module, mesh=mesh["dp"])
        seen = gradients(layers, lambda _, *inputs, model=model: model(*inputs))
        graphs = counters["stats"]["unique_graphs"], counters["graph_break"].total()
        whole = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in seen]
        found[axis] = largest_difference(whole, expected), graphs
    process_group.leave()
    return found


def compile_experts(rank: int, mode: str, degrees: dict[str, Any]) -> tuple[float, tuple[int, int]]:
    process_group.join(2, torch.device("cpu"), 120.0)
    config = config_of(
        Row(
            "",
            degrees | recomputed(mode),
            3,
            precision="fp64",
            shape=replace(MIXTURE, sliding_window=8),
        )
    )
    losses = []
    for compiled in ("off", "on"):
        torch._dynamo.reset()
        counters.clear()
        with with_backend("aot_eager"):
            engine = make_engine(
                replace(config, backend=replace(config.backend, compile=compiled)),
                torch.device("cpu"),
            )
            generator = torch.Generator().manual_seed(rank % config.parallel.dp)
            for _ in range(2):  # loads of the second step are others
                rows = torch.randint(config.model.vocab, (2, 33), generator=generator)
                result = engine.train_step([Batch.of_rows(rows.numpy())], 1e-2)
        losses.append(torch.stack((result.loss_sum, result.grad_norm)))
    counts = torch.ones(2, 2, dtype=torch.int64)
    name = torch.distributed.group.WORLD.group_name  # type: ignore[union-attr]
    torch.library.opcheck(exchange_counts, (counts, name), test_utils="test_faketensor")
    process_group.leave()
    stats = counters["stats"]["unique_graphs"], counters["graph_break"].total()
    return (losses[0] - losses[1]).abs().max().item(), stats


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "degrees", "graphs"),
    [
        ("full", {"dp": 2}, 5),
        ("none", {"tp": 2, "ep": 1}, 3),
        exhaustive("selective", {"tp": 2, "ep_over_tp": True}, 5),
    ],
)
def test_compiled_experts_of_two_ranks(mode: str, degrees: dict[str, Any], graphs: int) -> None:
    """One half of the batch is on its way while the other is computed; blocks compile once, the loss once."""
    for difference, seen in run_ranks(compile_experts, 2, mode, {"ep": 2} | degrees):
        assert difference < 1e-12
        assert seen == (graphs, 0)


class Order(TorchDispatchMode):
    """The order in which compiled and other code runs attention, exchanges and products of experts."""

    NAMES: ClassVar = {
        "all_to_all_single": "send",
        "wait_tensor": "wait",
        "multiply_by_expert": "experts",
        "gradient_by_expert": "weights",
    }

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.rows: list[int] = []
        """The rows of each product of experts."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition("::")[2]
        operations = [it.name() for it in args if isinstance(it, torch._ops.OpOverload)]
        is_attention = any("attention" in it for it in (name, *operations))
        known = "attention" if is_attention else self.NAMES.get(name)
        if known is not None and self.seen[-1:] != [known]:
            self.seen.append(known)
        if known in ("experts", "weights"):
            self.rows.append(len(args[1]))
        return func(*args, **(kwargs or {}))


def see_order(rank: int, backend: str) -> tuple[str, str, int]:
    """Return the orders of a forward pass and of a backward pass that repeats it, and the least rows of a
    product. All tokens go to the first rank."""
    process_group.join(2, torch.device("cpu"), 120.0)
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "ep"))
    layers = nn.ModuleDict({"0": Block(replace(SHAPE, experts=4, experts_per_token=2), 0)})
    degrees = Parallel(dp=2, ep=2, **MODES["full"])
    layout = ExpertLayout(mesh["data"], mesh["ep"], mesh["ep"].get_group())
    expert.apply(SimpleNamespace(layers=layers), degrees, None, layout)  # type: ignore[arg-type]
    for parameter in layers.parameters():
        nn.init.normal_(getattr(parameter.data, "_local_tensor", parameter.data), std=0.1)
    layers["0"].mlp.router.choice_bias[:2] = 2**50
    activation.apply(layers, degrees)
    with with_backend(backend):
        compile.apply(layers, replace(Config(), backend=Backend(compile="on")))
    hidden = torch.randn(2, 16, 32, requires_grad=True)
    rotation = rope_rotation(SHAPE, torch.arange(16), torch.float32, 16)
    run_layers(layers, hidden, (rotation, rotation), (None, None)).sum().backward()  # compiles
    with Order() as forward:
        output = run_layers(layers, hidden, (rotation, rotation), (None, None)).sum()
    with Order() as backward:
        output.backward()
    process_group.leave()
    return " ".join(forward.seen), " ".join(backward.seen), min(forward.rows + backward.rows)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", exhaustive("inductor")])
def test_tokens_of_one_half_travel_while_the_other_half_is_computed(backend: str) -> None:
    """Read from what was compiled. Gradients of weights are computed where their inputs are, and not at the
    end. Recomputation sends nothing back, since nothing reads it."""
    for forward, backward, rows in run_ranks(see_order, 2, backend):
        assert forward == "attention send attention send wait experts send wait experts send wait"
        half = "send wait" + 3 * " weights experts"
        again = "attention send attention send wait experts wait experts wait"
        assert backward == f"{again} {half} {half} send wait attention wait attention"
        assert rows > 0, "kernels of GPUs refuse products without rows"


def fuse_collectives(rank: int, mode: str) -> tuple[float, list[int]]:
    """Return the difference that fused operations make, and their calls. The CPU computes what defines them."""
    process_group.join(2, torch.device("cpu"), 120.0)
    mesh = init_device_mesh("cpu", (2,))
    divide = partial(divide_block, mesh=mesh, stream=ResidualStream.on_mesh(mesh, True))
    calls = []
    for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
        calls.append(Mock(wraps=getattr(symmetric, f"_{name}_fallback")))
        symmetric.lib.impl(name, lambda *args, it=calls[-1], **options: it(*args, **options), "CPU")
    results = []
    for compiled in ("off", "on"):
        with (
            with_backend(partial(compile_fx, inner_compile=passes_alone)),
            symmetric._test_mode(),
            patch.object(torch._inductor.config, "_micro_pipeline_tp", True),
            patch.object(torch._inductor.config, "post_grad_custom_pre_pass", JoinProducts()),
            patch.object(torch.distributed, "is_nccl_available", lambda: True),
        ):
            layers, run = make(mode, compiled, divide)
            found = gradients(layers.double(), run, torch.float64, shards=2)
        results.append([getattr(it, "_local_tensor", it) for it in found])
    process_group.leave()
    return largest_difference(*results), [it.call_count for it in calls]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "gathers", "scatters"), [("none", 4, 4), ("full", 6, 5)])
def test_collectives_in_products(mode: str, gathers: int, scatters: int) -> None:
    """All of a forward and of a backward pass; a second forward pass needs no last scatter."""
    for difference, calls in run_ranks(fuse_collectives, 2, mode):
        assert difference < 1e-12
        assert calls == [gathers * LAYERS, scatters * LAYERS]


@pytest.mark.slow
def test_compiled_blocks_in_shards() -> None:
    """FSDP2 or tp divides their parameters: one compilation serves all, without graph breaks."""
    for found in run_ranks(compile_in_shards, 2):
        for difference, graphs in found.values():
            assert difference < 1e-5
            assert graphs == (1, 0)
