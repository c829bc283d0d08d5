"""Attention over a divided sequence is attention over the whole one, in a part of the memory on each rank."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from nanoscale.config.schema import Model
from nanoscale.models import attention, attention_kernels
from nanoscale.models.attention import PASSES, AttentionSpan, DocumentEnds, dense_attention
from nanoscale.models.attention_kernels import KERNELS, Attended, Limits, Pairs, has_cudnn
from nanoscale.parallel import context, ring
from tests.support.ranks import run_ranks

DEGREES = (2, 4)
SEQ, HEADS, HEAD_DIM, BATCH = 48, 8, 6, 2
CPU = torch.device("cpu")
BOUNDS = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 0.03, "float16": 0.005}


class Case(NamedTuple):
    method: str
    kernel: str
    dtype: str
    kv_heads: int
    way: str

    def __str__(self) -> str:
        return "-".join(map(str, self))


KERNELS_OF = {"ring": ("portable", "flash-cpu"), "ulysses": ("-",)}
CASES = [
    Case(method, kernel, dtype, kv_heads, "plain")
    for method in ("ring", "ulysses")
    for kernel in KERNELS_OF[method]
    for dtype in BOUNDS
    for kv_heads in (8, 4)
] + [
    Case(method, KERNELS_OF[method][-1], "float64", 4, way)
    for method in ("ring", "ulysses")
    for way in ("padded", "checkpoint", "selective", "compiled", "no_grad")
]


@cache
def whole(dtype: str, kv_heads: int, seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """q, k, v and grad_out of the whole sequence, and the out and gradients that PyTorch computes in fp64."""
    generator = torch.Generator().manual_seed(seed)
    given = [
        torch.randn(BATCH, heads, SEQ, HEAD_DIM, generator=generator, dtype=torch.float64)
        for heads in (HEADS, kv_heads, kv_heads, HEADS)
    ]
    given = [x.to(getattr(torch, dtype)) for x in given]
    q, k, v, grad_out = (x.detach().double() for x in given)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    k, v = (x.repeat_interleave(HEADS // kv_heads, dim=1) for x in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return given, [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]


def deviations(case: Case, group: dist.ProcessGroup, seed: int = 0) -> list[float]:
    """Return the errors of this rank's out and gradients, relative to the whole sequence's largest values."""
    place = dist.get_rank(group), dist.get_world_size(group)
    mine = context.positions(case.method, SEQ // place[1], *place, CPU)
    given, expected = whole(case.dtype, case.kv_heads, seed)
    q, k, v, grad_out = (x[:, :, mine].clone() for x in given)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    core = context.make_core(case.method, group, Model())
    kernels = KERNELS
    if case.way == "padded":
        kernels = {name: replace(kernel, head_dim_multiple=8) for name, kernel in KERNELS.items()}
    with (
        patch.object(context, "choose_kernel", lambda *_, **__: case.kernel),
        patch.object(attention, "KERNELS", kernels),
    ):
        if case.way == "no_grad":
            with torch.no_grad():
                found = [core(*leaves)]
        else:
            out = run(case.way, core, leaves)
            found = [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]
    assert all(x.dtype == q.dtype for x in found)
    return [
        float((x - y[:, :, mine]).abs().max() / y.abs().max())
        for x, y in zip(found, expected, strict=False)
    ]


ENDS = torch.tensor([[5, 6, 6, 7, 40, 48], [17, 30, 31, 48, 48, 48]], dtype=torch.int32)
"""The ends of documents of any length, in two rows."""


seen = Limits.seen


def seen_within_bound(limits: Limits, *sizes: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """FlashAttention would leave out the rows beyond the longest document."""
    assert max(int(it.diff().max()) for it in limits[:2]) <= limits.longest
    return seen(limits, *sizes, **options)


def limited_rank(
    rank: int, softcap: float | None, has_sinks: bool, window: int, ends: Tensor
) -> dict[str, float]:
    """Return the largest error of a rank's result and gradients within documents and a window, by method."""
    dist.init_process_group("gloo")
    place, errors = (rank, dist.get_world_size()), {}
    (q, k, v, grad_out), _ = whole("float64", 4)
    sinks = torch.linspace(-1, 1, HEADS, dtype=torch.float64) if has_sinks else None
    mask = (torch.arange(SEQ)[:, None] >= ends[:, None]).sum(-1)
    mask = (mask[:, :, None] == mask[:, None]).tril().triu(1 - window)[:, None]
    leaves = [x.detach().requires_grad_() for x in (q, k, v, *([sinks] if has_sinks else []))]
    q, k, v, *learned = leaves
    out = dense_attention(q, k, v, mask, softcap, learned[0] if learned else None)
    expected = [out, *torch.autograd.grad(out, leaves, grad_out)]
    for method in ("ring", "ulysses"):
        mine = context.positions(method, SEQ // place[1], *place, CPU)
        core = context.make_core(method, dist.group.WORLD, Model(attention_softcap=softcap))
        local = [x.detach()[:, :, mine].requires_grad_() for x in leaves[:3]]
        local += [x.detach().requires_grad_() for x in leaves[3:]]
        span = AttentionSpan.of(DocumentEnds.of(ends.numpy()), SEQ)._replace(
            window=window if window < SEQ else None
        )
        with patch.object(Limits, "seen", seen_within_bound):
            out = core(*local[:3], span, sinks=local[3] if has_sinks else None)
            found = [out, *torch.autograd.grad(out, local, grad_out[:, :, mine])]
        for shared in found[4:]:
            dist.all_reduce(shared)
        wanted = [x[:, :, mine] for x in expected[:4]] + expected[4:]
        errors[method] = max(
            float((x - y).detach().abs().max()) for x, y in zip(found, wanted, strict=True)
        )
    return errors


@pytest.mark.parametrize(
    ("degree", "softcap", "has_sinks", "window", "ends"),
    [
        (2, None, False, SEQ, ENDS),
        (4, None, True, SEQ, ENDS),
        (4, 2.0, True, SEQ, ENDS),
        (4, None, False, 7, ENDS),
        (4, 2.0, True, 8, ENDS),
        (2, None, True, 14, ENDS),
        (4, None, True, 1, ENDS),
        (4, None, False, 30, torch.full((BATCH, 1), SEQ, dtype=torch.int32)),
        (4, None, False, SEQ - 1, ENDS),
    ],
)
def test_documents_and_windows_of_any_length_in_a_divided_sequence(
    degree: int, softcap: float | None, has_sinks: bool, window: int, ends: Tensor
) -> None:
    for errors in run_ranks(limited_rank, degree, softcap, has_sinks, window, ends):
        assert max(errors.values()) < 1e-12


def run(way: str, core: torch.nn.Module, leaves: list[Tensor]) -> Tensor:
    if way == "checkpoint":
        return checkpoint(core, *leaves, use_reentrant=False)
    if way == "selective":
        return checkpoint(core, *leaves, use_reentrant=False, context_fn=keep_results)
    if way == "compiled":
        return torch.compile(core, backend="aot_eager", fullgraph=True)(*leaves)
    return core(*leaves)


def keep_results() -> Any:
    """Return contexts that keep communicated results and recompute all else."""

    def policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = "attention" in operation.name() or "all_to_all" in operation.name()
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def compare_rank(rank: int, cases: list[Case]) -> dict[Case, list[float]]:
    dist.init_process_group("gloo")
    return {case: deviations(case, dist.group.WORLD) for case in cases}


# One degree is enough for the compiler, which every rank would import for seconds.
RUNS = [(n, case) for n in DEGREES for case in CASES if n == 2 or case.way != "compiled"]


@cache
def compared(degree: int) -> dict[Case, list[float]]:
    """Return the largest deviation over ranks of out, grad_q, grad_k and grad_v, by case."""
    cases = [case for n, case in RUNS if n == degree]
    everyone = run_ranks(compare_rank, degree, cases)
    return {
        case: torch.tensor([found[case] for found in everyone]).amax(0).tolist() for case in cases
    }


@pytest.mark.slow
@pytest.mark.parametrize(("degree", "case"), RUNS, ids=str)
def test_a_divided_sequence_equals_the_whole(degree: int, case: Case) -> None:
    found = compared(degree)[case]
    assert len(found) == (1 if case.way == "no_grad" else 4)
    assert all(deviation <= BOUNDS[case.dtype] for deviation in found), found


def subgroup_rank(rank: int, cases: list[Case]) -> list[list[float]]:
    dist.init_process_group("gloo")
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return [deviations(case, pairs[rank % 2], seed=rank % 2) for case in cases]


def test_groups_work_side_by_side() -> None:
    cases = [Case(method, "portable", "float64", 4, "plain") for method in ("ring", "ulysses")]
    assert torch.tensor(run_ranks(subgroup_rank, 4, cases)).max() <= 1e-12


MEMORY_CASES = [("portable", 512), ("portable", 1024), ("flash-cpu", 1024)]
KV_HEADS = 4


def memory_rank(rank: int) -> list[tuple[int, int]]:
    dist.init_process_group("gloo")
    return [allocations(dist.group.WORLD, kernel, seq) for kernel, seq in MEMORY_CASES]


def allocations(group: dist.ProcessGroup, kernel: str, seq: int) -> tuple[int, int]:
    """Return the bytes that a pass forward and backward adds: the peak, and the largest tensor."""
    mine = seq // group.size()
    q, k, v, grad_out = (
        torch.randn(1, heads, mine, 8, dtype=torch.float64)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        blocks = ring.Blocks(group, KERNELS[kernel], 1.0)
        out, lse = ring.pass_keys(q, k, v, blocks)
        ring.pass_gradients(grad_out, Attended(q, k, v, out, lse), blocks)
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    return max(accumulate(changes)), max(changes)


@pytest.mark.parametrize("degree", [1, *DEGREES])
def test_memory_falls_with_the_square_of_the_degree(degree: int) -> None:
    """The portable kernel holds two blocks of scores backward, weights and gradients; else one.

    With s tokens a rank, n query heads and m kv heads of size d, in numbers: 2 n s² for the two, n s d each for
    out and grad_q, m s d each for grad_k and grad_v and for the k and v on their way, and n s each for lse and
    the sums of weight · gradient. A fused kernel holds no block.
    """
    d, traveling = 8, 2 if degree > 1 else 0
    a_token = 2 * HEADS * d + (2 + traveling) * KV_HEADS * d + 2 * HEADS
    for found in run_ranks(memory_rank, degree):
        for (kernel, seq), (most, largest) in zip(MEMORY_CASES, found, strict=True):
            s = seq // degree
            block = 8 * HEADS * s**2
            if kernel == "portable":
                assert largest == block
                assert most == pytest.approx(2 * block + 8 * a_token * s, rel=0.01)
            else:
                assert most < block / 2


def bookkeeping_rank(rank: int) -> dict[str, Any]:
    """Return the tensors that a ring's call saves, its number of runs under checkpointing, and its order of
    work."""
    dist.init_process_group("gloo")
    core = context.make_core("ring", dist.group.WORLD, Model())
    shapes = [(BATCH, heads, 8, HEAD_DIM) for heads in (HEADS, 4, 4)]
    leaves = [torch.randn(shape, requires_grad=True) for shape in shapes]
    saved: list[tuple[int, ...]] = []

    def save(tensor: Tensor) -> Tensor:
        saved.append((*tensor.shape,))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
        core(*leaves)
    return {
        "saved": sorted(saved),
        "calls": {way: count_calls(way, leaves) for way in ("plain", "checkpoint", "selective")},
        "order": order_of_work(leaves),
    }


def count_calls(way: str, leaves: list[Tensor]) -> tuple[int, int]:
    """Sends of the ring, and exchanges of Ulysses."""
    names = []
    for method in ("ring", "ulysses"):
        core = context.make_core(method, dist.group.WORLD, Model())
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            run(way, core, leaves).sum().backward()
        names += [event.name() for event in profiler.profiler.kineto_results.events()]
    return names.count("gloo:send"), names.count("gloo:all_to_all")


def order_of_work(leaves: list[Tensor]) -> list[str]:
    done = []
    kernel = KERNELS["portable"]

    class Spy(ring.Transfer):
        def __init__(self, tensors: Any, group: Any) -> None:
            done.append("send")
            super().__init__(tensors, group)

        def wait(self) -> list[Tensor]:
            done.append("wait")
            return super().wait()

    def forward(*args: Any) -> Any:
        done.append("compute")
        return kernel.forward(*args)

    with patch.object(ring, "Transfer", Spy), torch.no_grad():
        q, k, v = leaves
        ring.pass_keys(
            q, k, v, ring.Blocks(dist.group.WORLD, replace(kernel, forward=forward), 1.0)
        )
    return done


def test_bookkeeping() -> None:
    for found in run_ranks(bookkeeping_rank, 4):
        heads, kv_heads = ((BATCH, n, 8, HEAD_DIM) for n in (HEADS, 4))  # q and out, k and v
        lse = (BATCH, HEADS, 8)
        assert found["saved"] == sorted([heads, heads, kv_heads, kv_heads, lse])
        # Forward k and v make 3 hops; backward they make 3, and their gradients 4. What is computed again stops
        # before the last exchange, whose result nothing is computed from.
        once, again = (2 * 3 + 2 * (3 + 4), 4 + 4), (2 * 3 + 2 * 3 + 2 * (3 + 4), 4 + 3 + 4)
        assert found["calls"] == {"plain": once, "checkpoint": again, "selective": once}
        hop = ["wait", "send", "compute"]
        assert found["order"] == ["send", "compute", *hop, *hop, "wait", "compute"]


def operation_rank(rank: int) -> None:
    dist.init_process_group("gloo")
    q, grad_out = (torch.randn(BATCH, HEADS, 8, HEAD_DIM) for _ in range(2))
    k, v = (torch.randn(BATCH, 4, 8, HEAD_DIM) for _ in range(2))
    for kernel, window in (("portable", None), ("flash-cpu", None), ("portable", 3)):
        ends = None if window is None else torch.full((BATCH, 1), 16, dtype=torch.int32)
        settings = (dist.group.WORLD.group_name, kernel, 1.0, None, window, 16)
        forward, backward = PASSES["ring_attention"]
        out, lse = forward(q, k, v, None, ends, *settings)
        checks = {"test_utils": ("test_schema", "test_faketensor")}
        torch.library.opcheck(forward, (q, k, v, None, ends, *settings), **checks)
        torch.library.opcheck(backward, (grad_out, q, k, v, out, lse, ends, *settings), **checks)


def test_operations_say_what_they_return() -> None:
    run_ranks(operation_rank, 2)


class Called(TorchDispatchMode, dict[str, Any]):
    """The arguments of operations by name."""

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        self[func._schema.name.removeprefix("aten::")] = args
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["flash-cuda", "cudnn", "documents", "window"])
def test_cuda_kernel_calls_what_pytorch_declares(name: str) -> None:
    """Without a GPU: names, arguments and shapes only."""
    q, k, v, grad_out = (
        torch.empty(2, heads, 16, 64, dtype=torch.bfloat16, device="meta") for heads in (8, 4, 4, 8)
    )
    starts = torch.empty(6, dtype=torch.int32, device="meta")
    window = 3 if name == "window" else None
    limits = None if name in KERNELS else Limits(starts, starts, 5, window)
    kernel = KERNELS[name if limits is None else "flash-cuda"]
    with Called() as called:
        out, lse = kernel.forward(q, k, v, Pairs(True, 0.125, limits))
    lengths = called["_flash_attention_forward"][5:7] if limits else None
    assert lengths == (limits and (5, 5)), "more thread blocks than the longest document needs"
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:-1], torch.float32)
    block = Attended(q, k, v, out, lse).block(slice(8, None), slice(None))
    grads = kernel.backward(grad_out[:, :, 8:], block, Pairs(window is not None, 0.125, limits))
    assert [grad.shape for grad in grads] == [q[:, :, 8:].shape, k.shape, v.shape]


FUSED = [
    "flash-cpu",
    *(
        pytest.param(
            name,
            marks=pytest.mark.skipif(not is_there(), reason=f"needs a GPU of NVIDIA with {name}"),
        )
        for name, is_there in (("flash-cuda", torch.cuda.is_available), ("cudnn", has_cudnn))
    ),
]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", FUSED)
def test_fused_kernel_equals_the_portable(name: str, causal: bool) -> None:
    """On one block of half the queries, with an out and lse of more keys, as in the middle of the ring."""
    device = torch.device("cpu" if name == "flash-cpu" else "cuda")
    torch.manual_seed(0)
    q, k, v, grad_out = (
        torch.randn(2, heads, 64, 64, device=device).bfloat16() for heads in (8, 4, 4, 8)
    )
    portable, fused = KERNELS["portable"], KERNELS[name]
    q, grad_out = q[:, :, 32:], grad_out[:, :, 32:]
    out, lse = portable.forward(q, k, v, Pairs(False, 0.125))
    out = out.bfloat16()
    keys = slice(32) if causal else slice(None)
    k, v = k[:, :, keys], v[:, :, keys]
    pairs, block = Pairs(causal, 0.125), Attended(q, k, v, out, lse)
    ours, exact = (
        (*kernel.forward(q, k, v, pairs), *kernel.backward(grad_out, block, pairs))
        for kernel in (fused, portable)
    )
    for x, y in zip(ours, exact, strict=True):
        assert float((x - y).abs().max() / y.abs().max()) <= 0.03


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_positions_cover_the_sequence_and_balance_the_work(method: str) -> None:
    parts = [context.positions(method, 6, rank, 4, CPU) for rank in range(4)]
    assert sorted(torch.cat(parts).tolist()) == list(range(24))
    assert all(part.dtype == torch.int64 for part in parts)
    if method == "ring":
        assert parts[1].tolist() == [3, 4, 5, 18, 19, 20]
        assert len({int(part.sum()) for part in parts}) == 1, "as many keys to attend to"
    else:
        assert parts[1].tolist() == [6, 7, 8, 9, 10, 11]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "kernel"), [("bfloat16", "flash-cuda"), ("float32", "portable")])
def test_a_ring_on_gpus_is_compiled_as_a_whole(
    dtype: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that the compiler cannot trace is an error with `fullgraph`."""
    monkeypatch.setattr(attention, "has_cuda_flash", lambda: True)
    # A build of PyTorch for CPUs cannot index what claims to be on a GPU, so the result claims no such thing.
    monkeypatch.setattr(context, "ring_attention", lambda q, *_: torch.zeros(q.shape))
    monkeypatch.setattr("torch._subclasses.fake_tensor.init_gpu_context", lambda *_: None)
    core = context.RingAttention(None, Model())  # type: ignore[arg-type]

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        return graph.forward

    with FakeTensorMode():
        q = torch.empty(1, 4, 32, 24, device="cuda", dtype=getattr(torch, dtype))
        k = torch.empty(1, 2, 32, 24, device="cuda", dtype=getattr(torch, dtype))
        assert q.is_cuda
        compiled = torch.compile(core, backend=backend, fullgraph=True)
        assert compiled(q, k, k).shape == q.shape
        assert attention_kernels.choose_kernel(q, True) == kernel
