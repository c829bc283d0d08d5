"""Speeds of single kernels by shape: attention, products of experts, permutations, updates of optimizers.

Usage: python3 -m benchmarks.gpu.kernels cpu|cuda FOLDER [SKIPPED…]

Prints one JSON line each. TFLOP/s count the pairs that a query sees, and 2.5 times as much in a backward pass.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.items import run_items
from benchmarks.gpu.peers import seconds_of
from nanoscale.backends.optimizer import make_optimizer
from nanoscale.config.schema import Optimizer
from nanoscale.models import moe
from nanoscale.models.attention import AttentionSpan, CausalAttention, DocumentEnds

Figures = dict[str, Any]
SEQ, HEADS, TOKENS = 8192, 32, 16384
HEAD_SIZES = (64, 72, 128, 192)
GROUPED = tuple(
    (width, ffn, experts, rows)
    for width, ffn, experts in ((2048, 768, 16), (4096, 14336, 8))
    for rows in (512, 2048, 8192)
)
"""Products of experts: width, width of the hidden layer, number of experts, rows of each expert."""
TIMES = 5


def main() -> None:
    device = torch.device("cuda", 0) if sys.argv[1] == "cuda" else torch.device("cpu")
    run_items(kernels(device), sys.argv[3:], "failed")


def kernels(device: torch.device) -> dict[str, Callable[[], Figures]]:
    """Return measurements by name, the most valuable first; on a CPU of toy sizes."""
    small = 1 if device.type == "cuda" else 32
    items: dict[str, Callable[[], Figures]] = {}
    for width, ffn, experts, rows in GROUPED:
        sizes = [it // small for it in (width, ffn, rows)]
        items[f"grouped {width}x{ffn}, {rows} rows"] = partial(grouped, device, experts, *sizes)
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        for head in HEAD_SIZES:
            name = f"{backend.name.partition('_')[0].lower()} {head}"
            items[name] = partial(attention, device, SEQ // small, head, backend=backend)
    for head in (64, 128):
        items[f"documents of 1,024, {head}"] = partial(
            attention, device, SEQ // small, head, documents=True
        )
        items[f"window of 1,024, {head}"] = partial(
            attention, device, SEQ // small, head, window=True
        )
    items["permutations"] = partial(permutations, device, TOKENS // small, 2048 // small)
    for name in ("adamw", "bf16-pure", "adamw8bit", "lion", "schedule-free", "adafactor", "muon"):
        items[f"update {name}"] = partial(update, device, name, 8192 // small)
    return items


def timed(
    act: Callable[[], Tensor], inputs: list[Tensor], flops: float, backward: float
) -> Figures:
    """Return TFLOP/s of a function and of its backward pass, which has `backward` times its operations."""
    device = inputs[0].device
    with torch.no_grad():
        seconds = [seconds_of(act, device, TIMES)]
    out = act()
    grad = torch.randn_like(out)
    again = partial(torch.autograd.grad, out, inputs, grad, retain_graph=True)
    seconds.append(seconds_of(again, device, TIMES))
    speeds = flops / seconds[0] / 1e12, backward * flops / seconds[1] / 1e12
    text = f"{speeds[0]:,.1f} TFLOP/s forward, {speeds[1]:,.1f} backward"
    return {"seconds_of": seconds, "tflops": speeds, "verdict": text}


def tensor(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.bfloat16).requires_grad_()


def attention(
    device: torch.device,
    seq: int,
    head: int,
    backend: SDPBackend | None = None,
    documents: bool = False,
    window: bool = False,
) -> Figures:
    """Measure causal attention of one sequence, 8 heads of keys, in `backend` or as a layer computes it."""
    q, k, v = (tensor(device, 1, heads, seq, head) for heads in (HEADS, 8, 8))
    near = seq // 8
    pairs = seq * near if window else seq * near / 2 if documents else seq * seq / 2
    flops = 4 * pairs * HEADS * head
    if backend is not None:
        kernel = [backend, SDPBackend.MATH] if device.type == "cpu" else backend
        with sdpa_kernel(kernel):
            act = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)
            return timed(act, [q, k, v], flops, 2.5)
    layer = CausalAttention(SimpleNamespace(attention_softcap=None))  # type: ignore[arg-type]
    ends = torch.arange(near if documents else seq, seq + 1, near, device=device).int()
    span = AttentionSpan.of(DocumentEnds(ends.unsqueeze(0), near), seq)._replace(
        window=near if window else None
    )
    return timed(partial(layer, q, k, v, span), [q, k, v], flops, 2.5)


def grouped(device: torch.device, experts: int, width: int, ffn: int, rows: int) -> Figures:
    """Measure the product of gate or up of all experts, each with as many rows."""
    x, weight = tensor(device, experts * rows, width), tensor(device, experts, ffn, width)
    ends = torch.arange(1, experts + 1, device=device, dtype=torch.int32) * rows
    flops = 2 * experts * rows * width * ffn
    return timed(lambda: F.grouped_mm(x, weight.mT, offs=ends), [x, weight], flops, 2)


def permutations(device: torch.device, tokens: int, width: int) -> Figures:
    """Measure sorting, spreading and summing the rows of 8 of 128 experts, read and written once each."""
    x = tensor(device, tokens, width).detach()
    chosen = torch.rand(tokens, 128, device=device).topk(8).indices
    pairs = moe.ExpertPairs.of_choices(chosen, 128, chosen.numel())
    rows = moe.spread(x, pairs)
    acts = {
        "sort": lambda: moe.ExpertPairs.of_choices(chosen, 128, chosen.numel()),
        "spread": lambda: moe.spread(x, pairs),
        "sum": lambda: moe.sum_rows(rows, pairs),
    }
    times = {name: seconds_of(act, device, TIMES) for name, act in acts.items()}
    moved = (x.nbytes + rows.nbytes) / 1e9
    speed = " · ".join(f"{name} {moved / times[name]:,.0f} GB/s" for name in ("spread", "sum"))
    return {"seconds_of": times, "verdict": f"sort {1e3 * times['sort']:.2f} ms · {speed}"}


def update(device: torch.device, name: str, size: int) -> Figures:
    """Measure the update of 16 square matrices, 1.07 B parameters of 8,192."""
    rounded = name == "bf16-pure"
    dtype = torch.bfloat16 if rounded else torch.float32
    named = [
        (f"layers.{i}.mlp.up.weight", nn.Parameter(torch.zeros(size, size, device=device, dtype=dtype)))
        for i in range(16)
    ]  # fmt: skip
    config = Optimizer(name="adamw" if rounded else name)  # type: ignore[arg-type]
    optimizer = make_optimizer(named, config, rounded=rounded)
    for _, parameter in named:
        parameter.grad = torch.randn_like(parameter)
    times = seconds_of(optimizer.step, device, TIMES)
    return {"seconds_of": times, "verdict": f"{1e3 * times:,.1f} ms for {16 * size**2 / 1e9:.2f} B"}


if __name__ == "__main__":
    main()
