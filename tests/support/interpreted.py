"""Blocks that Inductor compiles for a GPU, and whose kernels Triton's interpreter runs on a CPU.

The compiler traces a block on tensors of a GPU, as in a job. Its code then gets tensors of the CPU. PyTorch
computes products and attention, and Triton interprets every fused kernel. Triton reads `TRITON_INTERPRET` when
it is loaded, so call `differences` in a process of `process()`.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F

from nanoscale.config.schema import Model
from nanoscale.models.attention_kernels import KERNELS, Attended, Pairs
from nanoscale.models.transformer import Transformer
from nanoscale.rehearse.played import compiled, cuda, fake_tensors
from nanoscale.rehearse.played.patches import Patches

GPU = torch.device("cuda", 0)
H100 = cuda.Gpu("NVIDIA H100", 80 << 30, 8)
_FLASH = torch.ops.aten._scaled_dot_product_flash_attention
_ROWS, _TOKENS = 2, 12
_ZERO = 1e-9
_ATTENTION = KERNELS["flash-cpu"]


@contextmanager
def process() -> Iterator[ProcessPoolExecutor]:
    """Start a process in which Triton interprets its kernels."""
    with (
        patch.dict(os.environ, {"TRITON_INTERPRET": "1"}),
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool,
    ):
        yield pool


def differences(
    shape: Model, layers: Sequence[int], change: tuple[str, str] | None = None
) -> tuple[dict[str, float], list[str]]:
    """Return how far compiled blocks are from eager ones in fp64, and the kernels that were interpreted.

    Args:
        layers: the numbers of the blocks.
        change: a text in the source of kernels, and its replacement.

    Returns:
        differences: norms of differences over norms: of "output", and of the gradients of "input" and of the
            parameters by their names.
        kernels: their names, in the order of their launches.
    """
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Transformer(shape, layers, first=False, last=False)
    model.materialize(torch.device("cpu"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    hidden, grad = torch.randn(2, _ROWS, _TOKENS, shape.hidden)
    expected = _results(copy.deepcopy(model).double(), hidden.double(), grad.double())
    with Patches() as patches:
        kernels = _compile_for_gpu(patches, change)
        for block in model.layers.values():
            block.forward = torch.compile(block.forward, fullgraph=True)
        results = _results(model, hidden, grad)
    pairs = {name: (results[name].double(), value) for name, value in expected.items()}
    return {name: _difference(*pair) for name, pair in pairs.items()}, kernels


def _difference(value: Tensor, exact: Tensor) -> float:
    norm = exact.norm()
    # The gradient of a bias of keys that are not rotated is 0, but for rounding.
    return float((value - exact).norm() / (norm if norm > _ZERO else 1))


def _results(model: Any, hidden: Tensor, grad: Tensor) -> dict[str, Tensor]:
    output = model(hidden.requires_grad_())
    output.backward(grad)
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"output": output.detach(), "input": hidden.grad, **grads}


def _compile_for_gpu(patches: Patches, change: tuple[str, str] | None) -> list[str]:
    """Let the compiler believe that tensors of the CPU are on a GPU; return the list of interpreted kernels."""
    for name in ("torch.distributed.fsdp", "torch._dynamo", *compiled.LOADED):
        import_module(name)
    guards: Any = torch._C._dynamo.guards
    compiler = import_module(compiled.LOADED[0]).AsyncCompile
    load, part = compiler.triton, guards._reinterpret_tensor
    world = SimpleNamespace(device=GPU, stream=0, record=SimpleNamespace(), lines={})
    fake_tensors.report_devices(patches, None, GPU)  # type: ignore[arg-type]
    cuda.pretend(patches, H100, world)
    compiled.patch(patches, world, H100)
    # What rehearsals play is run here.
    empty = torch.empty_strided
    patches.replace(guards, "_empty_strided_cuda", lambda *sizes: empty(*sizes[:2], dtype=sizes[2]))
    patches.replace(guards, "_reinterpret_tensor", part)
    patches.replace(import_module("torch._inductor.config"), "profile_bandwidth", False)
    kernels: list[str] = []

    def load_changed(self: Any, name: str, source: str, **options: Any) -> Any:
        kernel = load(self, name, source.replace(*change) if change else source, **options)

        def run(*args: Any, **options: Any) -> None:
            kernels.append(name)
            kernel.run(*args, **options)

        return SimpleNamespace(run=run)

    patches.replace(compiler, "triton", load_changed)
    helpers = import_module("torch._inductor.runtime.triton_helpers")
    patches.replace(helpers, "set_driver_to_gpu", lambda: None)
    patches.replace(helpers, "libdevice", _Libdevice())
    describer = import_module("torch._subclasses.meta_utils").MetaTensorDescriber
    describe = describer.describe_tensor

    def on_gpu(self: Any, tensor: Tensor, **options: Any) -> Any:
        return replace(describe(self, tensor, **options), device=GPU)

    patches.replace(describer, "describe_tensor", on_gpu)
    _attend_by_flash(patches)
    return kernels


class _Libdevice:
    """NVIDIA's functions, which the interpreter lacks, as PyTorch's functions of the same names."""

    def __getattr__(self, name: str) -> Any:
        import triton.language as tl
        from triton.runtime.interpreter import TensorHandle

        def call(*args: Any) -> Any:
            result = getattr(torch, name)(*(torch.from_numpy(it.handle.data) for it in args))
            of_numbers = args[0].type
            dtype = tl.int1 if result.dtype is torch.bool else of_numbers.scalar
            handle = TensorHandle(result.numpy(), dtype)
            return tl.tensor(handle, of_numbers.with_element_ty(dtype))

        return call


def _attend_by_flash(patches: Patches) -> None:
    """Let the compiler see FlashAttention's operations, as in bf16 on a GPU, and run the attention of CPUs."""

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        return _FLASH(q, k, v, 0.0, options["is_causal"], scale=q.shape[-1] ** -0.5)[0]

    def forward(q: Tensor, k: Tensor, v: Tensor, _: float, causal: bool, *, scale: float) -> Any:
        out, lse = _ATTENTION.forward(q, k, v, Pairs(causal, scale))
        state, out = torch.zeros(2, dtype=torch.uint64), torch.empty_like(q).copy_(out)
        return (
            out,
            lse.contiguous(),
            None,
            None,
            q.shape[2],
            k.shape[2],
            state,
            state[0],
            q.new_empty(0),
        )

    def backward(grad: Tensor, *rest: Any, scale: float) -> Any:
        q, k, v, out, lse, *_, causal, _, _ = rest
        grads = _ATTENTION.backward(grad, Attended(q, k, v, out, lse), Pairs(causal, scale))
        return tuple(
            torch.empty_like(it).copy_(of) for it, of in zip((q, k, v), grads, strict=True)
        )

    library = torch.library.Library("aten", "IMPL", "CPU")
    patches.callback(library._destroy)
    library.impl("_scaled_dot_product_flash_attention", forward)
    library.impl("_scaled_dot_product_flash_attention_backward", backward)
    patches.replace(F, "scaled_dot_product_attention", attend)
