"""The code that Inductor writes for the job's device, which is played without a GPU and a C++ compiler.

The compiler traces a block as in the job: on tensors without numbers, for the GPU of `cluster`. The generated
code then runs in the played world: it allocates and frees its buffers, calls products, attention and
collectives in its order, and its fused kernels are work of as many bytes as Inductor counts for them.

Not done are what needs the device: measurements of padded products and of variants of a kernel.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from tempfile import NamedTemporaryFile, TemporaryDirectory
from types import SimpleNamespace
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
    "joint_graph_constant_folding": False, "profile_bandwidth": True, "use_static_cuda_launcher": False,
}  # fmt: skip
"""Settings of Inductor. `profile_bandwidth` lets it write the bytes of each kernel into its code."""
_BYTES = re.compile(r"'kernel_num_gb': ([0-9.e+-]+)")
_VARIES = re.compile(r"'(ks\d+|\w+numel)': 'i(?!.*^ +\1 = )", re.DOTALL | re.MULTILINE)
_READ = re.compile(r"tl\.load\((in_ptr\d+|in_out_ptr\d+) \+ (\([^)]*\))")
_NVIDIA = re.compile(r"\b(REG|STACK):(\d+)")
_AMD = re.compile(r"\.([sv]gpr_(?:spill_)?count): +(\d+)")
_CHIPS = {"MI210": "gfx90a", "MI250": "gfx90a", "MI350": "gfx950", "MI355": "gfx950"}
"""The architectures of AMD's GPUs that are not gfx942."""
_NO_MODEL = r"(?!.*/(?:torch|torchao|rehearse/played)/|.*/local_parameters\.py)"
_FRAME = re.compile(rf'File "({_NO_MODEL}[^"]+)", line (\d+)')
"""A frame of the model: not of PyTorch, of this room, or of the wrapper of modules that tp divides."""
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
    folder = os.environ.get("TRITON_CACHE_DIR") or patches.enter_context(TemporaryDirectory())
    patches.replace(import_module("torch._inductor.codecache"), "cache_dir", lambda: folder)
    patches.replace_item(os.environ, "TRITON_CACHE_DIR", folder)
    scheduling = import_module("torch._inductor.codegen.triton").TritonScheduling
    patches.wrap(scheduling, "define_kernel", partial(_with_lines, world))
    compiler, guards = import_module(LOADED[0]).AsyncCompile, torch._C._dynamo.guards
    for kind in ("triton", "cpp_pybinding"):
        patches.replace(compiler, kind, lambda _, *words, **__: _Kernel(world, words))
    empty = partial(torch.empty_strided, device=world.device)
    for kind in ("cpu", "cuda"):
        patches.replace(guards, f"_empty_strided_{kind}", lambda *it: empty(*it[:2], dtype=it[2]))
    patches.replace(guards, "_reinterpret_tensor", _part)
    if gpu is None:
        import_module("torch._inductor.fx_passes.post_grad").lazy_init()
    else:
        world.record.target = _pretend(patches, world.device, gpu)


def breaks() -> list[str]:
    """Return a sentence for each place at which the compiler broke a function in two."""
    return [f"the compiler breaks a block in two {_place(it)}" for it in graph_break_reasons]


def _place(broken: Any) -> str:
    """Return the innermost line that is not PyTorch's, and why it was not traced."""
    own = [frame for frame in broken.user_stack if "/torch/" not in frame.filename]
    (*_, frame) = own or broken.user_stack
    explained = re.search(r"Explanation: (.+)", broken.reason)
    why = explained[1] if explained else broken.reason.splitlines()[0]
    return f"at {_line(frame.filename, frame.lineno)}: {why.strip()}"


def recompilations(step: int) -> list[str]:
    """Return a sentence for each block that was compiled again since the last call, except in the first step,
    and for each block that the compiler gave up because it had been compiled too often."""
    metrics = [it for it in get_compilation_metrics() if it.recompile_reason]
    clear_compilation_metrics()
    said = {True: "gives up, so blocks run eagerly,", False: "compiles blocks again"}
    return [
        f"the compiler {said[bool(it.fail_reason)]} in step {step}: {it.recompile_reason}"
        for it in metrics
        if step > 1 or it.fail_reason
    ]


class _Kernel:
    """A kernel that Inductor wrote: its work is the bytes that it reads and writes."""

    def __init__(self, world: Any, words: Sequence[Any]) -> None:
        *names, self.source = (word for word in words[:2] if isinstance(word, str))
        self.name = names[0] if names else "cpp"
        self.lines = [*world.lines.pop(self.name, ())]
        self.times = self.bytes = 0
        """The times that it runs in the last step, and the bytes of all these times."""
        self._world = world
        # The sizes of some are known when they run.
        found = None if _VARIES.search(self.source) else _BYTES.search(self.source)
        self._bytes = None if found is None else round(float(found[1]) * 1e9)
        world.kernels.append(self)

    def run(self, *args: Any, **_: Any) -> None:
        if not self._world.keeps_timeline:
            return
        moved = self._bytes or sum(bytes_of(arg) for arg in flat(args) if isinstance(arg, Tensor))
        self.times += self._world.repeat
        self.bytes += self._world.repeat * moved
        self._world.add_work(("bytes", self.name, moved))

    __call__ = run

    def read_again(self) -> list[str]:
        """Return the inputs that it reads twice, since a row is longer than what it holds at once."""
        reads = Counter(_READ.findall(self.source))
        return sorted({pointer for (pointer, _), times in reads.items() if times > 1})


def _with_lines(world: Any, define: Callable[..., str]) -> Callable[..., str]:
    """Keep the innermost lines of the model that a kernel computes, by its name, until its code is loaded."""

    def define_kernel(scheduling: Any, source: str, nodes: Sequence[Any], kernel: Any) -> str:
        name = define(scheduling, source, nodes, kernel)
        lines = world.lines.setdefault(name, {})  # equal code of other nodes has the same name
        parts = [each for it in nodes for each in getattr(it, "get_nodes", list)()]
        for origin in (origin for it in parts if it.node for origin in it.node.origins):
            for frame in _FRAME.findall(origin.meta.get("stack_trace") or "")[-1:]:
                lines[_line(*frame)] = None
        return name

    return define_kernel


def _line(file: str, line: Any) -> str:
    return f"{file.removeprefix(PACKAGE).lstrip('/')}:{line}"


def machine_code(kernels: Sequence[_Kernel]) -> list[dict[str, Any]]:
    """Compile the kernels of the last step for the world's GPU; return what Triton and ptxas made of each.

    Returns:
        For each kernel its name, the lines that it computes, how often it runs in a step, the mean bytes that
        it moves, the registers of a thread, the bytes spilled from them, its shared memory in bytes, and the
        inputs that it reads again. Of the variants that a GPU would measure, the first is compiled.
    """
    return [
        {"name": it.name, "lines": it.lines, "times": it.times, "bytes": it.bytes // it.times}
        | {"reads_again": it.read_again(), **_resources(it)}
        for it in kernels
        if it.times and it.name.startswith("triton_")
    ]


def _resources(kernel: _Kernel) -> dict[str, int]:
    """Return the registers, spilled bytes and shared memory of a kernel."""
    load = import_module(LOADED[0])._load_triton_kernel_from_source
    tuner = load(kernel.name, kernel.source)
    compiled = tuner._precompile_config(tuner.configs[0]).kernel
    shared, code = compiled.metadata.shared, compiled.asm
    if "amdgcn" in code:
        used = dict(_AMD.findall(code["amdgcn"]))
        spilled = 4 * (int(used["sgpr_spill_count"]) + int(used["vgpr_spill_count"]))
        return {"registers": int(used["vgpr_count"]), "spilled": spilled, "shared": shared}
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code["cubin"])
        file.flush()
        tool = import_module("triton").knobs.nvidia.cuobjdump.path
        command = [tool, "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, check=True).stdout.decode()
    used = dict(_NVIDIA.findall(said))
    return {"registers": int(used["REG"]), "spilled": int(used["STACK"]), "shared": shared}


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


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def _pretend(patches: Patches, device: torch.device, gpu: Gpu) -> str:
    """Let the compiler believe in a GPU; return Triton's kind of it, its architecture and threads of a warp."""
    version: Any = 10 * gpu.capability[0] + gpu.capability[1]
    properties, kind, warp = torch.cuda.get_device_properties(), "cuda", 32
    if gpu.name.startswith("AMD"):
        version = next((arch for name, arch in _CHIPS.items() if name in gpu.name), "gfx942")
        kind, warp = "hip", 64
        patches.replace(torch.version, "hip", "7.0")
        patches.replace(properties, "gcnArchName", version)
        patches.replace(properties, "warp_size", warp)
    target = import_module("triton.backends.compiler").GPUTarget(kind, version, warp)
    driver = SimpleNamespace(
        get_current_target=_always(target), get_current_device=_always(device.index),
        get_active_torch_device=_always(device), is_active=_always(True),
    )  # fmt: skip
    import_module("triton.runtime").driver.set_active(driver)
    helpers = import_module("torch._inductor.runtime.triton_helpers")
    patches.replace(helpers, "set_driver_to_gpu", _always(None))
    interface = import_module("torch._dynamo.device_interface").CudaInterface
    values = {
        "get_compute_capability": version, "is_available": True, "current_device": device.index,
        "exchange_device": 0, "maybe_exchange_device": 0, "synchronize": None, "set_device": None,
        "get_raw_stream": 0, "get_device_properties": properties,
    }  # fmt: skip
    for owner in (interface, interface.Worker):
        for name, value in values.items():
            patches.replace(owner, name, staticmethod(_always(value)))
    patches.replace(torch._C, "_cuda_getCurrentRawStream", _always(0))
    has_triton = import_module("torch.utils._triton").has_triton
    has_triton.cache_clear()  # PyTorch may have asked without a GPU
    patches.callback(has_triton.cache_clear)
    return f"{kind} {version} {warp}"
