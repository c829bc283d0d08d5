"""Numbers of the code that only GPUs run, compared with the CPU in fp64.

Usage: python3 -m benchmarks.gpu.correct cpu|cuda FOLDER [SKIPPED…]

Each check prints one JSON line: its name, its error, its bound and a verdict. An error is the largest relative
difference of a result or gradient, by norms, unless the check's function says otherwise. On a CPU the same
checks run on the CPU's own kernels.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.gpu import cpu_kernels, cpu_nvfp4
from benchmarks.gpu.items import run_items
from nanoscale.backends import gradients, low_bits
from nanoscale.backends.native import NativeEngine
from nanoscale.backends.optimizer import clip_in_update, make_optimizer, skips_on_device
from nanoscale.checkpoint.staging import Staging
from nanoscale.common.devices import detect
from nanoscale.config.composing.compose import compose
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.rules import check as resolve
from nanoscale.config.schema import Optimizer
from nanoscale.data.batch import Batch
from nanoscale.models import initialization, moe
from nanoscale.models.attention import (
    AttentionSpan,
    CausalAttention,
    DocumentEnds,
    merge_sinks,
    pad_heads,
)
from nanoscale.models.attention_kernels import (
    KERNELS,
    Attended,
    Limits,
    Pairs,
    has_cuda_flash,
    has_cudnn,
)
from nanoscale.models.head import linear_cross_entropy
from nanoscale.parallel import process_group
from nanoscale.parallel.kernel_choice import set_kernels

Tensors = Sequence[Tensor]
Check = Callable[[torch.device], float]
BF16, FP32 = 2e-2, 1e-5
"""Bounds of sums of products in a dtype."""
CPU = torch.device("cpu")
TINY = (
    "recipe=tiny",
    "optimizer.lr=1e-3",
    "train.global_batch=4",
    "train.micro_batch=2",
    "parallel.dp=1",
)
MOE = ("model.experts=8", "model.experts_per_token=2", "model.ffn=128")  # fmt: skip


def main() -> None:
    device = torch.device("cuda", 0) if sys.argv[1] == "cuda" else CPU
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    items = {
        name: partial(judge, act, bound, device) for name, (act, bound) in checks(device).items()
    }
    run_items(items, sys.argv[3:])


def judge(act: Check, bound: float, device: torch.device) -> dict[str, Any]:
    error = act(device)
    if math.isinf(bound):
        return {"error": error, "verdict": "reported"}
    verdict = "ok" if error <= bound else "WRONG"
    return {"error": str(error) if math.isinf(error) else error, "bound": bound, "verdict": verdict}


def checks(device: torch.device) -> dict[str, tuple[Check, float]]:
    """Return checks with their bounds by name: what takes milliseconds first, compiled code last."""
    on_gpu = device.type == "cuda"
    kernels = ["portable", *(["flash-cuda"] if has_cuda_flash() else [])]
    kernels += ["cudnn"] if has_cudnn() else [] if on_gpu else ["flash-cpu"]
    found: dict[str, tuple[Check, float]] = {
        "router product": (router_product, FP32),
        "experts": (experts, BF16),
        "experts with biases": (partial(experts, biases=True), BF16),
        "experts of other ranks": (partial(experts, others=True), BF16),
    }
    for kernel in kernels:
        for head in (64, 128):
            for causal in (True, False):
                name = f"{kernel} {head}{' causal' * causal}"
                found[name] = partial(attention_kernel, kernel, head, causal, None), BF16
        if kernel in ("portable", "flash-cuda"):
            found[f"{kernel} documents"] = partial(attention_kernel, kernel, 64, True, "own"), BF16
            other = partial(attention_kernel, kernel, 64, False, "other")
            found[f"{kernel} keys of another rank"] = other, BF16
    for head in (64, 72, 128, 192):
        found[f"SDPA {head}"] = partial(attention, head), BF16
    for name in ("documents", "window", "sinks", "softcap"):
        found[f"attention {name}"] = partial(attention, 72, limit=name), BF16
    offload = ("parallel.activation_checkpointing=selective", "parallel.offload_activations=true")
    found |= {
        "staging beside a step": (staging, 0.0),
        "nf4": (nf4_product, BF16),
        **({"mxfp8": (mxfp8_product, BF16)} if has_mxfp8(device) else {}),
        **({"nvfp4": (nvfp4_product, BF16)} if has_mxfp8(device) else {}),
        **({"mxfp8 experts": (partial(narrow, "mxfp8"), BF16)} if has_mxfp8(device) else {}),
        **({"fp8 experts": (partial(narrow, "rowwise"), BF16)} if has_fp8_experts(device) else {}),
        "clip in the update": (clipped_update, FP32),
        "20 steps in fp32": (partial(steps_equal, (), 20), 1e-4),
        "3 steps with experts in fp32": (partial(steps_equal, MOE, 3), 1e-4),
        "5 steps in bf16-pure": (partial(steps_equal, ("precision=bf16-pure",), 5), 3e-2),
        "offloaded activations": (partial(steps_equal, offload, 3), 1e-4),
        "zero3-offload": (partial(steps_equal, ("zero=stage3-offload",), 3), 1e-4),
    }
    for mode in ("full", "selective"):
        found[f"routed again with {mode}"] = partial(routed_again, mode), 0.0
    for name in ("adamw", "sgd", "lion", "schedule-free", "adafactor", "muon"):
        loose = {"muon": 5e-2, "lion": 1e-2}.get(name, 1e-4)  # signs of the smallest numbers
        found[f"update {name}"] = partial(updates, name), loose
    found |= {
        "update adamw8bit": (partial(updates, "adamw8bit"), 5e-2),
        "update in bf16": (partial(updates, "adamw", dtype=torch.bfloat16), 5e-2),
        "fused loss": (partial(loss, fused=on_gpu), BF16),
        **({"compiled mxfp8": (partial(mxfp8_product, compiled=on_gpu), BF16)} if has_mxfp8(device) else {}),
        **({"compiled nvfp4": (partial(nvfp4_product, compiled=on_gpu), BF16)} if has_mxfp8(device) else {}),
        "compiled experts": (partial(steps_equal, MOE, 3, compiled=on_gpu), 1e-4),
        "compiled experts in bf16": (
            partial(steps_equal, (*MOE, "precision=bf16"), 3, compiled=on_gpu), BF16),
        "the same bits": (same_bits, math.inf),
        "the same bits with precision.deterministic": (
            partial(same_bits, "precision.deterministic=true"), 0.0),
    }  # fmt: skip
    return found


# Comparisons


def difference(found: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """Return the largest relative difference of tensors, by norms; infinite if one is not a number."""
    largest = 0.0
    for one, other in zip(found, expected, strict=True):
        a, b = one.detach().double().cpu(), other.detach().double().cpu()
        gap = torch.where(a == b, 0.0, a - b).norm()
        relative = (gap / b[b.isfinite()].norm().clamp(min=1e-30)).item()
        largest = max(largest, math.inf if math.isnan(relative) else relative)
    return largest


def compared(
    act: Callable[..., Tensor],
    device: torch.device,
    *shapes: tuple[int, ...],
    dtype: torch.dtype = torch.bfloat16,
    scale: float = 1.0,
) -> float:
    """Compare the result and the gradients of a function of random tensors with those on the CPU in fp64."""
    values = [(scale * noise(i, *shape)).to(dtype) for i, shape in enumerate(shapes)]
    results = []
    for tensors in ([it.to(device) for it in values], [it.double() for it in values]):
        inputs = [it.clone().requires_grad_() for it in tensors]
        out = act(*inputs)
        weights = noise(99, *out.shape).to(dtype).to(out.device, out.dtype)
        results.append([out, *torch.autograd.grad(out, inputs, weights)])
    return difference(*results)


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# Experts


def router_product(device: torch.device) -> float:
    """Compare products in fp32 of operands in 16 bits."""
    tokens, weight = (noise(i, rows, 64).bfloat16() for i, rows in enumerate((96, 8)))
    found = moe.multiply_router(tokens.to(device), weight.to(device))
    return difference([found], [tokens.double() @ weight.double().T])


def experts(device: torch.device, biases: bool = False, others: bool = False) -> float:
    """Compare uneven loads: two of eight experts have no tokens, and some choices may be other ranks'."""
    choice = torch.Generator().manual_seed(1)
    chosen = torch.stack([torch.randperm(6, generator=choice)[:2] for _ in range(96)])
    chosen[::3, 0] = 5
    chosen[::3, 1] = 8 if others else 1
    functions = moe.activations(shape_of(mlp="swiglu-clamped" if biases else "swiglu"))

    def act(tokens: Tensor, weights: Tensor, *matrices: Tensor) -> Tensor:
        number = int((chosen < 8).sum())
        pairs = moe.ExpertPairs.of_choices(chosen.to(tokens.device), 8, number)
        scales = weights.flatten().gather(0, pairs.slots)
        rows = moe.spread_to(2, tokens, pairs)
        return moe.sum_rows(moe.run_experts(functions, rows, scales, pairs.load, *matrices), pairs)

    of_bias = ((8, 128), (8, 128), (8, 64)) if biases else ()
    shapes = ((96, 64), (96, 2), (8, 128, 64), (8, 128, 64), (8, 64, 128), *of_bias)
    return compared(act, device, *shapes, scale=0.3)


def shape_of(**keys: object) -> Any:
    return SimpleNamespace(**keys)


# Attention


def attention(head: int, device: torch.device, limit: str = "") -> float:
    """Compare a layer's attention with `limit`: documents, window, sinks or softcap."""
    module = CausalAttention(shape_of(attention_softcap=5.0 if limit == "softcap" else None))
    documents = [[40, 41, 300], [300, 300, 300]] if limit == "documents" else [[300], [300]]

    def act(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
        span = None
        if limit in ("documents", "window"):
            ends, longest = DocumentEnds.of(np.array(documents, np.int32))
            span = AttentionSpan.of(DocumentEnds(ends.to(q.device), longest), 300)
            span = span._replace(window=50 if limit == "window" else None)
        out = module(q, k, v, span, sinks=sink if limit == "sinks" else None)
        return out + 0 * sink.sum()

    return compared(act, device, (2, 8, 300, head), *[(2, 2, 300, head)] * 2, (8,))


def attention_kernel(
    name: str, head: int, causal: bool, limited: str | None, device: torch.device
) -> float:
    """Compare a kernel's result, log-sum-exp and gradients, as a ring of ranks calls it."""
    seq, keys = 256, 256 if causal else 192
    starts = [[0, 30, 200, 256, 256, 300, 512], [0, 30, 200, 256, 256, 300, 512]]
    if limited == "other":  # a document without keys, and one without queries
        starts[1] = [0, 0, 150, 192, 260, 260, 384]
    shapes = (8, seq, head), (2, keys, head), (2, keys, head), (8, seq, head)
    values = [noise(i, 2, *shape) for i, shape in enumerate(shapes)]
    scale, results = head**-0.5, []
    narrow = [it.bfloat16() for it in values]
    for kernel, where, dtype in ((name, device, torch.bfloat16), ("portable", CPU, torch.float64)):
        q, k, v, grad = pad_heads(kernel, *(it.to(where, dtype) for it in narrow))
        limits = None
        if limited is not None:
            of_queries, of_keys = (torch.tensor(it).int().to(where) for it in starts)
            longest = int(max(it.diff().max() for it in (of_queries, of_keys)))
            limits = Limits(of_queries, of_keys, longest)
        pairs = Pairs(causal, scale, limits)
        out, lse = KERNELS[kernel].forward(q, k, v, pairs)
        if limited == "other":  # the backward pass gets what all ranks' keys give together
            out, lse = merge_sinks(out, lse, torch.zeros(8, device=where))
        attended = Attended(q, k, v, out.to(dtype), lse)
        results.append([out, lse, *KERNELS[kernel].backward(grad, attended, pairs)])
    return difference(*results)


# Products and updates


def nf4_product(device: torch.device) -> float:
    """Compare a product with a matrix in 4 bits with one of the same matrix in whole numbers of bits."""
    weight, x = noise(1, 256, 256).bfloat16(), noise(2, 32, 256).bfloat16()
    packed: Any = low_bits.to_nf4(weight.to(device))
    unpacked = low_bits.to_nf4(weight)
    expected = x.double() @ unpacked.to(torch.bfloat16).double().T
    return difference([F.linear(x.to(device), packed)], [expected])


def has_mxfp8(device: torch.device) -> bool:
    return device.type == "cpu" or torch.cuda.get_device_capability(device)[0] == 10


def mxfp8_product(device: torch.device, compiled: bool = False) -> float:
    """Compare the result and the gradients of a layer in MXFP8 with torchao's emulation on the CPU."""
    results = []
    for where in (device, CPU):
        layer = nn.Linear(256, 384, bias=False, dtype=torch.bfloat16)
        layer.weight.data = noise(1, 384, 256).bfloat16()
        low_bits.to_mxfp8([layer.to(where)], emulate=where == CPU)
        act: Any = torch.compile(layer) if compiled and where == device else layer
        x = noise(2, 2, 64, 256).to(where, torch.bfloat16).requires_grad_()
        out = act(x)
        grad = noise(3, 2, 64, 384).to(where, torch.bfloat16)
        results.append([out, *torch.autograd.grad(out, [x, layer.weight], grad)])
    return difference(*results)


def nvfp4_product(device: torch.device, compiled: bool = False) -> float:
    """Compare the result and the mean gradients of a layer in NVFP4 with `cpu_nvfp4`, which draws other
    numbers."""
    cpu_nvfp4.register()
    results = []
    for where in (device, CPU):
        layer = nn.Linear(256, 384, bias=False, dtype=torch.bfloat16)
        layer.weight.data = noise(1, 384, 256).bfloat16()
        low_bits.to_nvfp4([layer.to(where)])
        act: Any = torch.compile(layer) if compiled and where == device else layer
        x = noise(2, 2, 128, 256).to(where, torch.bfloat16).requires_grad_()
        grad = noise(3, 2, 128, 384).to(where, torch.bfloat16)
        torch.manual_seed(0)
        draws = 1 if device == CPU else 256
        drawn = [torch.autograd.grad(act(x), [x, layer.weight], grad) for _ in range(draws)]
        means = [torch.stack(it).float().mean(0) for it in zip(*drawn, strict=True)]
        results.append([act(x), *means])
    return difference(*results)


def has_fp8_experts(device: torch.device) -> bool:
    return device.type == "cpu" or torch.cuda.get_device_capability(device)[0] == 9


def narrow(recipe: str, device: torch.device) -> float:
    """Compare experts in 8 bits, one of which has no tokens, with the same on the CPU, where torchao emulates
    MXFP8 and `cpu_kernels` fp8."""
    cpu_kernels.register()
    choice = torch.Generator().manual_seed(1)
    chosen = torch.stack([torch.randperm(3, generator=choice)[:2] for _ in range(79)])
    results = []
    for where in (device, CPU):
        model = moe.Experts(shape_of(experts=4, hidden=128, ffn=256, mlp="swiglu", bias=False))
        for i, parameter in enumerate(model.parameters()):
            parameter.data = 0.3 * noise(i, *parameter.shape)
        model.to(where, torch.bfloat16)
        model.recipe = recipe
        shapes = (79, 128), (79, 2), (79, 128)
        tokens, weights, grad = (
            noise(3 + i, *it).to(where, torch.bfloat16).requires_grad_()
            for i, it in enumerate(shapes)
        )
        out = model(tokens, weights, chosen.to(where))
        inputs = [tokens, weights, *model.parameters()]
        results.append([out, *torch.autograd.grad(out, inputs, grad)])
    return difference(*results)


def loss(device: torch.device, fused: bool) -> float:
    """Compare the loss in chunks, with z-loss and bounded logits."""
    targets = torch.randint(1000, (64,), generator=torch.Generator().manual_seed(1))

    def act(hidden: Tensor, weight: Tensor) -> Tensor:
        on_gpu = hidden.is_cuda
        settings: dict[str, Any] = {"fused": fused and on_gpu, "z_loss": 1e-3, "softcap": 10.0}
        return linear_cross_entropy(hidden, weight, targets.to(hidden.device), **settings)

    return compared(act, device, (64, 128), (1000, 128), scale=0.5)


SHAPES = {
    "layers.0.attention.wq.weight": (256, 512),
    "layers.0.norm.weight": (512,),
    "embed.weight": (300, 256),
}


def optimizer_of(
    name: str, device: torch.device, dtype: torch.dtype
) -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
    named = [
        (key, nn.Parameter((0.1 * noise(i, *shape)).to(device, dtype)))
        for i, (key, shape) in enumerate(SHAPES.items())
    ]
    rounded = dtype == torch.bfloat16
    optimizer = make_optimizer(named, Optimizer(name=name, lr=1e-2), rounded=rounded)  # type: ignore[arg-type]
    return optimizer, [parameter for _, parameter in named]


def updates(name: str, device: torch.device, dtype: torch.dtype = torch.float32) -> float:
    """Compare the movement of the weights in three updates with the CPU's, and a skipped one with none."""
    moved = []
    for where in (device, CPU):
        optimizer, parameters = optimizer_of(name, where, dtype)
        before = [it.detach().float().clone() for it in parameters]
        for step in range(3):
            for i, it in enumerate(parameters):
                it.grad = (0.01 * noise(10 * step + i, *it.shape)).to(where, dtype)
            optimizer.step()
        moved.append([it.float() - old for it, old in zip(parameters, before, strict=True)])
        if not skips_on_device(optimizer):
            continue
        kept = [it.detach().clone() for it in parameters]
        for it in parameters:
            it.grad = torch.full_like(it, torch.inf)
        optimizer.found_inf = torch.ones((), device=where)  # type: ignore[attr-defined]
        optimizer.step()
        if not all(map(torch.equal, parameters, kept)):
            raise ArithmeticError("a skipped step changed weights")
    return difference(*moved)


def clipped_update(device: torch.device) -> float:
    """Compare an update that divides the gradients itself with gradients clipped before in fp64."""
    results = []
    for where, dtype in ((device, torch.float32), (CPU, torch.float64)):
        optimizer, parameters = optimizer_of("adamw", where, dtype)
        before = [it.detach().clone() for it in parameters]
        for step in range(3):
            for i, it in enumerate(parameters):
                it.grad = (10.0**step * noise(10 * step + i, *it.shape)).to(where, dtype)
            grads = [it.grad for it in parameters if it.grad is not None]
            norm = gradients.global_norm(grads)
            if not (where == device and clip_in_update(optimizer, norm, 0.5)):
                gradients.clip(grads, norm, 0.5)
            optimizer.step()
        results.append([it - old for it, old in zip(parameters, before, strict=True)])
    return difference(*results)


def staging(device: torch.device) -> float:
    """Count the numbers of a staged copy that an update after `hold` has changed."""
    stage, changed = Staging(), 0
    weight = noise(1, 1 << 20).to(device)
    for _ in range(3):
        expected = weight.cpu().clone()
        copy = stage.copy({"model.weight": weight})
        later = weight @ weight  # beside the copy
        if not weight.is_cuda:
            stage.fill()
        stage.hold()
        weight.add_(later / later + 1)
        stage.fill()
        changed += int((copy["model.weight"] != expected).sum())
    return float(changed)


# Training


def configured(device: torch.device, *overrides: str) -> ResolvedConfig:
    words = (*TINY, f"launcher.device={device.type}", *overrides)
    if not any(it.startswith("precision=") for it in overrides):
        words += ("precision=fp32", "precision.tf32=false")
    return resolve(compose(words), detect())


def trained(
    device: torch.device, number: int, *overrides: str
) -> tuple[list[float], list[Tensor], list[int]]:
    """Return losses and weights of some steps, and numbers of changed and of all recomputed routings."""
    config = configured(device, *overrides)
    if config.precision.deterministic:
        set_kernels(config)
    process_group.join(1, device, 120, even_alone=config.offloads)
    dice, losses = np.random.default_rng(1), []
    train = config.train
    changed, first, repeated = [0, 0], [], []  # type: tuple[list[int], list[Tensor], list[Tensor]]
    choose, draw = moe.choose_experts, initialization.draw

    def on_cpu(name: str, size: torch.Size, shape: Any, seed: int, device: torch.device) -> Tensor:
        return draw(name, size, shape, seed, CPU).to(device)

    def watched(*arguments: Any) -> Tensor:
        chosen: Tensor = choose(*arguments)
        (repeated if moe.is_recomputed() else first).append(chosen)
        return chosen

    if "backend.compile=on" not in overrides:
        moe.choose_experts = watched  # type: ignore[assignment]
    # Parameters are drawn on their device, and both devices need the same.
    initialization.draw = on_cpu
    try:
        engine = NativeEngine(config, device)
        for _ in range(number):
            rows = dice.integers(config.model.vocab, size=(train.global_batch, train.seq_len + 1))
            halves = [Batch.of_rows(half) for half in np.split(rows, train.global_batch // 2)]
            result = engine.train_step(halves, 1e-3)
            losses.append(result.loss_sum.item() / float(result.tokens))
            gaps = [min(int((it != one).any(1).sum()) for one in first) for it in repeated]
            changed = [changed[0] + sum(gaps), changed[1] + len(gaps)]
            first.clear()
            repeated.clear()
    finally:
        moe.choose_experts, initialization.draw = choose, draw
        process_group.leave()
    weights = [gradients.local_tensor(it.detach()).cpu().clone() for _, it in engine.parameters()]
    return losses, weights, changed


def steps_equal(
    overrides: Sequence[str], number: int, device: torch.device, compiled: bool = False
) -> float:
    """Compare the losses of steps with the CPU's in fp64, or of compiled steps with the same eager ones."""
    if compiled:
        other = trained(device, number, *overrides)[0]
        overrides = (*overrides, "backend.compile=on")
    else:
        others = tuple(it for it in overrides if it.startswith("model."))
        other = trained(CPU, number, *others, "precision=fp64")[0]
    losses = trained(device, number, *overrides)[0]
    return max(abs(a - b) / b for a, b in zip(losses, other, strict=True))


def routed_again(mode: str, device: torch.device) -> float:
    """Count the tokens that a recomputation sends to other experts than the forward pass."""
    words = (*MOE, "precision=bf16", f"parallel.activation_checkpointing={mode}")
    *_, (changed, recomputed) = trained(device, 2, *words)
    if not recomputed:
        raise AssertionError("nothing was recomputed")
    return float(changed)


def same_bits(*arguments: Any) -> float:
    """Count the weights' tensors that differ between two equal trainings."""
    *overrides, device = arguments
    words = (*MOE, "precision=bf16", *overrides)
    one, other = (trained(device, 5, *words)[1] for _ in range(2))
    return float(sum(not torch.equal(a, b) for a, b in zip(one, other, strict=True)))


if __name__ == "__main__":
    main()
