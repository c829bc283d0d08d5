"""`torch.cuda` of a host without GPUs: properties, streams and events. Waits for the device are recorded.

Fused kernels of GPUs take tensors without numbers; PyTorch for CPUs runs several operations instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from nanoscale.checkpoint import staging
from nanoscale.models.attention_kernels import has_cudnn
from nanoscale.rehearse.played.patches import Operation, Patches


@dataclass(frozen=True)
class Gpu:
    """The properties of a GPU and its host that torch.cuda reports."""

    name: str
    memory: int
    """Bytes."""
    devices: int
    """The number of GPUs of the host."""
    capability: Sequence[int] = (9, 0)
    """CUDA's compute capability, major and minor."""


class _Generator(torch.Generator):
    """A random generator of the CPU for every device, since no numbers are drawn on the GPU."""

    def __new__(cls, device: Any = None) -> Any:
        return super().__new__(cls)


def pretend(patches: Patches, gpu: Gpu, world: Any) -> None:
    """Let torch.cuda report the GPU of a `played.world.World`, and the world's memory."""

    class Properties:
        name, total_memory = gpu.name, gpu.memory
        major, minor = gpu.capability
        multi_processor_count, warp_size, L2_cache_size = 132, 32, 50 << 20
        max_threads_per_multi_processor, max_threads_per_block = 2048, 1024
        regs_per_multiprocessor, shared_memory_per_block = 65536, 49152
        shared_memory_per_block_optin, shared_memory_per_multiprocessor = 232448, 233472
        is_integrated, pci_bus_id = False, 0

    Properties.gcnArchName = ""  # type: ignore[attr-defined]

    values = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: gpu.devices,
        "current_device": lambda: world.device.index,
        "set_device": lambda *_: None,
        "device": lambda *_: nullcontext(),
        "_DeviceGuard": lambda *_: nullcontext(),
        "get_device_name": lambda *_: gpu.name,
        "get_device_capability": lambda *_: tuple(gpu.capability),
        "get_device_properties": lambda *_: Properties,
        "is_bf16_supported": lambda *_, **__: True,
        "can_device_access_peer": lambda *_: True,
        "memory_allocated": lambda *_: world.live,
        "max_memory_allocated": lambda *_: world.peak,
        "memory_reserved": lambda *_: world.allocator.reserved,
        "max_memory_reserved": lambda *_: world.allocator.reserved,
        "reset_peak_memory_stats": lambda *_: world.reset_peak(),
        "empty_cache": lambda: None,
        "manual_seed": lambda *_: None,
        "manual_seed_all": lambda *_: None,
        "get_rng_state": lambda *_: torch.empty(0, dtype=torch.uint8),
        "set_rng_state": lambda *_: None,
    }
    for name, value in values.items():
        patches.replace(torch.cuda, name, value)
    patches.replace(torch, "Generator", _Generator)
    patches.replace(torch.accelerator, "is_available", lambda: True)
    kind = torch.device("cuda")
    patches.replace(torch.accelerator, "current_accelerator", lambda *_, **__: kind)
    patches.replace(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    patches.replace(torch, "_fused_sdp_choice", _choice)
    patches.replace(torch.Tensor, "pin_memory", lambda self, *_: self)
    patches.replace(torch.Tensor, "is_pinned", lambda *_: False)
    patches.replace(torch.Tensor, "record_stream", lambda *_: None)
    for name in ("pin_memory", "unpin_memory"):
        patches.replace(staging, name, lambda *_: None)
    _replace_streams(patches, world)


def _stream_types(world: Any) -> tuple[Any, Any]:
    """Return the classes of streams and events of a played device. The default stream has number 0."""
    device, numbers = world.device, count(1)

    def number_of(stream: Any) -> int:
        return int(world.stream if stream is None else getattr(stream, "number", 0))

    class Event:
        def __init__(self, *_: Any, **__: Any) -> None:
            self.device = device
            self.at = -1

        def record(self, stream: Any = None) -> Event:
            world.end_segment()
            self.at = world.last.get(number_of(stream), -1)
            return self

        def wait(self, stream: Any = None) -> None:
            world.add_event("after", self.at, number_of(stream))

        def synchronize(self) -> None:
            world.wait("Event.synchronize", self.at)

        def query(self) -> bool:
            return True

        def elapsed_time(self, _: Any) -> float:
            return 1.0

    class Stream:
        device_index = device.index

        def __init__(self, *_: Any, number: int | None = None, **__: Any) -> None:
            self.number = next(numbers) if number is None else number
            self.device = device

        def wait_stream(self, other: Any) -> None:
            self.wait_event(Event().record(other))

        def wait_event(self, event: Event) -> None:
            event.wait(self)

        def record_event(self, event: Event | None = None) -> Event:
            return (event or Event()).record(self)

        def synchronize(self) -> None:
            world.wait("Stream.synchronize", Event().record(self).at)

        def query(self) -> bool:
            return True

        def is_capturing(self) -> bool:
            return False

        def __enter__(self) -> Stream:
            return self

        def __exit__(self, *_: Any) -> None: ...

    return Stream, Event


def _replace_streams(patches: Patches, world: Any) -> None:
    """Replace the streams and events of torch.cuda and torch.accelerator."""
    Stream, Event = _stream_types(world)  # noqa: N806

    @contextmanager
    def on_stream(stream: Any) -> Iterator[None]:
        before, world.stream = world.stream, getattr(stream, "number", 0)
        try:
            yield
        finally:
            world.stream = before

    def current_stream(*_: Any) -> Any:
        return Stream(number=world.stream)

    for name, value in {
        "Stream": Stream,
        "Event": Event,
        "stream": on_stream,
        "current_stream": current_stream,
        "default_stream": lambda *_: Stream(number=0),
        "is_current_stream_capturing": lambda: False,
        "synchronize": lambda *_: world.wait("torch.cuda.synchronize"),
    }.items():
        patches.replace(torch.cuda, name, value)
    patches.replace(torch.accelerator, "current_stream", lambda *_: current_stream())


aten = torch.ops.aten


def use_fused_kernels(patches: Patches) -> None:
    """Replace functions for which C++ chooses a kernel by the device of the tensors."""
    patches.wrap(F, "scaled_dot_product_attention", _attention)
    for owner, make in ((F, _rms_norm), (F, _softmax), (F, _silu), (torch, _where)):
        patches.wrap(owner, make.__name__[1:], partial(_unless_compiled, make))


def _unless_compiled(make: Operation, plain: Operation) -> Operation:
    """Replace a function by `make(function)`, except in what is compiled."""
    made = make(plain)

    def call(*args: Any, **options: Any) -> Any:
        return (plain if torch.compiler.is_compiling() else made)(*args, **options)

    return call


def update_in_place(patches: Patches) -> None:
    """Skip the update of 8-bit AdamW, which allocates nothing when it is compiled."""
    patches.replace(import_module("torchao.optim.adam"), "single_param_adam", lambda *_: None)


class _RmsNorm(torch.autograd.Function):
    """A norm with the inputs and saved tensors of CUDA's fused kernel."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return x.clone()  # which takes as long

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, weight, _ = ctx.saved_tensors
        return torch.add(x, grad), torch.empty_like(weight)


class _Silu(torch.autograd.Function):
    """SiLU whose backward pass is one kernel, as on CUDA. On `meta` it would be several operations."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (x,) = ctx.saved_tensors
        return torch.add(x, grad)


def _attention(plain: Operation) -> Operation:
    """Replace attention by a fused kernel that stores no scores, if CUDA has one for these inputs."""

    @torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
    def enabled() -> tuple[bool, bool, bool]:
        kernels = torch.backends.cuda
        efficient = kernels.mem_efficient_sdp_enabled()
        return kernels.cudnn_sdp_enabled(), kernels.flash_sdp_enabled(), efficient

    def attention(q: Any, k: Any, v: Any, attn_mask: Any = None, **options: Any) -> Any:
        if q.device.type != "cuda":
            return plain(q, k, v, attn_mask, **options)
        cudnn_on, flash_on, efficient_on = enabled()
        bias = None if attn_mask is None else _bias(attn_mask, q)
        causal, scale = options.get("is_causal", False), options.get("scale")
        half = q.dtype in (torch.bfloat16, torch.float16)
        narrow = v.shape[-1] < q.shape[-1]
        if (bias is not None or narrow) and half and cudnn_on:
            cudnn = aten._scaled_dot_product_cudnn_attention
            return cudnn(q, k, v, bias, True, 0.0, causal, scale=scale)[0]
        fused = half and not narrow and (flash_on or cudnn_on)
        if bias is None and fused:
            flash = aten._scaled_dot_product_flash_attention
            return flash(q, k, v, 0.0, causal, scale=scale)[0]
        ungrouped = (narrow or q.dtype is torch.float32) and not options.get("enable_gqa")
        if ungrouped and efficient_on:
            efficient = aten._scaled_dot_product_efficient_attention
            return efficient(q, k, v, bias, True, 0.0, causal, scale=scale)[0]
        return plain(q, k, v, attn_mask, **options)

    return attention


def _choice(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """Return the number of the kernel that PyTorch 2.13 chooses for causal attention: cuDNN's or flash's."""
    widths = q.shape[-1], v.shape[-1]
    return 3 if has_cudnn() and (max(widths) <= 128 or widths == (192, 128)) else 1


def _bias(mask: Any, q: Any) -> Any:
    """Return the numbers that a fused kernel adds to the scores: PyTorch makes them of a mask of booleans."""
    bias = torch.zeros_like(mask, dtype=q.dtype)
    return bias.expand(*q.shape[:3], mask.shape[-1])


def _rms_norm(plain: Operation) -> Operation:
    def rms_norm(x: Any, shape: Any, weight: Any = None, eps: Any = None) -> Any:
        fused = x.device.type == "cuda" and weight is not None and not isinstance(weight, DTensor)
        return _RmsNorm.apply(x, weight) if fused else plain(x, shape, weight, eps)

    return rms_norm


def _silu(plain: Operation) -> Operation:
    def silu(x: Any, inplace: bool = False) -> Any:
        return _Silu.apply(x) if x.device.type == "cuda" and not inplace else plain(x, inplace)

    return silu


def _where(plain: Operation) -> Operation:
    """Choose between tensors in place of numbers, which fake tensors would choose on another device."""

    def where(condition: Any, *values: Any, **options: Any) -> Any:
        if condition.device.type == "cuda" and all(isinstance(value, int) for value in values):
            values = tuple(torch.full((), value, device=condition.device) for value in values)
        return plain(condition, *values, **options)

    return where


def _softmax(plain: Operation) -> Operation:
    """Replace softmax by the kernel of GPUs, which also casts its input."""

    def softmax(x: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
        if x.device.type == "cuda" and dtype is torch.float32 and x.dtype != dtype:
            return aten._softmax(x, dim, True)
        return plain(x, dim=dim, _stacklevel=_stacklevel, dtype=dtype)

    return softmax
