"""The code that Inductor writes for the job's device, which is played without a GPU and a C++ compiler.

The compiler traces a block as in the job: on tensors without numbers, for the GPU of `cluster`. The generated
code then runs in the played world: it allocates and frees its buffers, calls products, attention and
collectives in its order, and its fused kernels are work of as many bytes as Inductor counts for them.

Not done are what needs the device: measurements of padded products and of variants of a kernel.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import import_module
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import (
    clear_compilation_metrics,
    get_compilation_metrics,
    graph_break_reasons,
)
from torch._inductor.custom_graph_pass import CustomGraphPass

from nanoscale.rehearse.played.cuda import Gpu
from nanoscale.rehearse.played.fake_tensors import META
from nanoscale.rehearse.played.patches import Patches
from nanoscale.rehearse.played.record import PACKAGE
from nanoscale.rehearse.played.work import bytes_of, flat

LOADED = (
    "torch._inductor.async_compile",
    "torch._inductor.compile_fx",
    "torch._inductor.fx_passes.fuse_attention",
)
"""Modules that every copy of the process needs."""
_CONFIG = {
    "compile_threads": 1, "fx_graph_cache": False, "assume_aligned_inputs": True, "shape_padding": False,
    "joint_graph_constant_folding": False, "profile_bandwidth": True,
}  # fmt: skip
"""Settings of Inductor. `profile_bandwidth` lets it write the bytes of each kernel into its code."""
_BYTES = re.compile(r"'kernel_num_gb': ([0-9.e+-]+)")


_TRACKED = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


def patch(patches: Patches, world: Any, gpu: Gpu | None) -> None:
    """Let Inductor compile for the device of a world, and the world play its kernels."""
    # Generators of a GPU are not there.
    patches.replace(
        import_module("torch._functorch.config"), "graphsafe_rng_functionalization", False
    )
    for name, value in _CONFIG.items():
        patches.replace(import_module("torch._inductor.config"), name, value)
    patches.replace(
        import_module("torch._inductor.config"), "joint_custom_pre_pass", _OnGpu(world.device)
    )
    patches.replace(import_module(LOADED[2]), "_sfdp_init", lambda *_: None)
    folder = patches.enter_context(TemporaryDirectory(prefix="nanoscale-compiled-"))
    patches.replace(import_module("torch._inductor.codecache"), "cache_dir", lambda: folder)
    compiler, guards = import_module(LOADED[0]).AsyncCompile, torch._C._dynamo.guards
    for kind in ("triton", "cpp_pybinding"):
        patches.replace(compiler, kind, lambda _, *words, **__: _Kernel(world, words))
    for kind in ("cpu", "cuda"):
        patches.replace(guards, f"_empty_strided_{kind}", _empty(world))
    patches.replace(guards, "_reinterpret_tensor", _part)
    if gpu is None:
        import_module("torch._inductor.fx_passes.post_grad").lazy_init()
    else:
        _pretend(patches, world.device, gpu.capability)


def breaks() -> list[str]:
    """Return a sentence for each place at which the compiler broke a function in two."""
    return [f"the compiler breaks a block in two {_place(it)}" for it in graph_break_reasons]


def _place(broken: Any) -> str:
    """Return the innermost line that is not PyTorch's, and why it was not traced."""
    own = [frame for frame in broken.user_stack if "/torch/" not in frame.filename]
    (*_, frame) = own or broken.user_stack
    explained = re.search(r"Explanation: (.+)", broken.reason)
    why = explained[1] if explained else broken.reason.splitlines()[0]
    return f"at {frame.filename.removeprefix(PACKAGE).lstrip('/')}:{frame.lineno}: {why.strip()}"


def recompilations() -> list[str]:
    """Return the guards that failed since the last call, for which functions were compiled again."""
    metrics = get_compilation_metrics()
    clear_compilation_metrics()
    return [it.recompile_reason for it in metrics if it.recompile_reason]


class _Kernel:
    """A kernel that Inductor wrote: its work is the bytes that it reads and writes."""

    def __init__(self, world: Any, words: Sequence[Any]) -> None:
        *names, source = (word for word in words[:2] if isinstance(word, str))
        self.name = names[0] if names else "cpp"
        self._world = world
        # The sizes of some are known when they run.
        found = None if "'ks0'" in source else _BYTES.search(source)
        self._bytes = None if found is None else round(float(found[1]) * 1e9)

    def run(self, *args: Any, **_: Any) -> None:
        size = self._bytes
        if size is None:
            size = sum(bytes_of(arg) for arg in flat(args) if isinstance(arg, Tensor))
        if self._world.keeps_timeline:
            self._world.add_work(("bytes", self.name, size))

    __call__ = run


def _empty(world: Any) -> Any:
    def empty_strided(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=world.device)

    return empty_strided


def _part(tensor: Tensor, size: Any, stride: Any, offset: int) -> Tensor:
    """Return a part of a tensor's memory, which is not a view to autograd."""
    with torch._C._ExcludeDispatchKeyGuard(_TRACKED):
        return tensor.as_strided(size, stride, tensor.storage_offset() + offset)


class _OnGpu(CustomGraphPass):
    """Replaces the device that C++ reports of played tensors, `meta`, by the GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, graph: Any) -> None:
        for node in graph.nodes:
            if node.target is torch.ops.prims.device_put.default and node.args[1] == META:
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)
            elif node.kwargs.get("device") == META:
                node.kwargs = {**node.kwargs, "device": self._device}

    def uuid(self) -> str:
        return str(self._device)


class _Driver:
    """Triton's driver of a GPU that this host does not have."""

    def __init__(self, device: torch.device, target: Any) -> None:
        self._device, self._target = device, target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int | None:
        return self._device.index

    def get_active_torch_device(self) -> torch.device:
        return self._device

    def is_active(self) -> bool:
        return True


def _pretend(patches: Patches, device: torch.device, capability: Sequence[int]) -> None:
    """Let the compiler believe in a GPU."""
    version = 10 * capability[0] + capability[1]
    target = import_module("triton.backends.compiler").GPUTarget("cuda", version, 32)
    import_module("triton.runtime").driver.set_active(_Driver(device, target))
    interface = import_module("torch._dynamo.device_interface").CudaInterface
    properties = torch.cuda.get_device_properties()
    values = {
        "get_compute_capability": version, "is_available": True, "current_device": device.index,
        "exchange_device": 0, "maybe_exchange_device": 0, "synchronize": None, "set_device": None,
        "get_raw_stream": 0, "get_device_properties": properties,
    }  # fmt: skip
    for owner in (interface, interface.Worker):
        for name, value in values.items():
            patches.replace(owner, name, staticmethod(lambda *_, value=value, **__: value))
    patches.replace(torch._C, "_cuda_getCurrentRawStream", lambda *_: 0)
    has_triton = import_module("torch.utils._triton").has_triton
    has_triton.cache_clear()  # PyTorch may have asked without a GPU
    patches.callback(has_triton.cache_clear)
