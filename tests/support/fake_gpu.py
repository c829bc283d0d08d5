"""GPUs that are not there: nanoscale's own engine on tensors with shapes, types and a device, but no numbers.

Python sees these tensors on `cuda:N`. C++ sees them on `meta`: a build of PyTorch for CPUs has no CUDA that
autograd could ask for streams. Tensors of the host are real. A process group answers every collective at
once.

Memory is counted as PyTorch's allocator does, in storages of whole 512 B. What is not counted: cuBLAS'
workspaces, NCCL's buffers, fragmentation. Compiled functions run eagerly.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from importlib import import_module
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
import torch._subclasses.fake_tensor as fake
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_iter, tree_map_only

from nanoscale.backends.native import NativeEngine
from nanoscale.config.derive import derive
from nanoscale.config.schema import Config
from nanoscale.data.batch import Batch
from tests.support.live_memory import LiveMemory

T = TypeVar("T")
aten = torch.ops.aten
META = torch.device("meta")
GRANULE = 512
"""Bytes that PyTorch's CUDA allocator rounds a tensor up to."""
DEVICES = 8
MEMORY = 141 * 10**9
_DEVICE_OF = torch.ops.prim.device.default


class FakeGpu(LiveMemory):
    """The memory of one GPU, and what its collectives give. Stands above a FakeTensorMode."""

    def __init__(self, device: torch.device, mode: FakeTensorMode) -> None:
        super().__init__()
        self.device, self.mode = device, mode
        self.built = False
        """True once the model has memory; until then its parameters are on the meta device."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE_OF:
            return _device_in_cpp(args[0]) if isinstance(args[0], FakeTensor) else func(*args)
        if any(kind not in (FakeTensor, torch.Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # they call operations on plain tensors, which come back here
        kwargs = {k: v for k, v in (kwargs or {}).items() if k != "pin_memory"}
        if func.namespace in ("c10d", "_c10d_functional"):
            return self._communicate(func, args, kwargs)
        if self.built and kwargs.get("device") == META:
            kwargs["device"] = self.device  # autograd asked C++ for a device and gives it back
        tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if self._is_of_the_host(tensors, kwargs.get("device")):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            return torch.zeros((), dtype=tensors[0].dtype).item() if _is_real(tensors[0]) else 1
        # The arguments are real tensors without their values: with values a FakeTensorMode would compute.
        args, kwargs = tree_map_only(torch.Tensor, self._fake, (args, kwargs))
        result = func(*args, **kwargs)
        tree_map_only(torch.Tensor, self._see, result)
        return result

    def _is_of_the_host(self, tensors: list[torch.Tensor], device: Any) -> bool:
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return False
        return device is None or torch.device(device).type in ("cpu", "meta")

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self.mode.from_tensor(tensor)

    def _see(self, tensor: Any) -> None:
        if isinstance(tensor, FakeTensor) and tensor.fake_device.type == "cuda":
            self.see_storage(tensor.untyped_storage())

    def resized(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._held:
            self.see_storage(storage)

    def _size(self, storage: torch.UntypedStorage) -> int:
        return -(-storage.nbytes() // GRANULE) * GRANULE

    def _communicate(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = func.__name__.partition(".")[0]
        if func.namespace == "_c10d_functional":
            result = _functional(name, args)
            tree_map_only(torch.Tensor, self._see, result)
            return result
        first = next((leaf for leaf in tree_iter(args) if isinstance(leaf, torch.Tensor)), None)
        given = []
        for kind in (str(returned.type) for returned in func._schema.returns):
            if "Work" in kind:
                given.append(torch._C._distributed_c10d.FakeWork().boxed())
            else:
                given.append(args[0] if "List" in kind or "[]" in kind else first)
        return given[0] if len(given) == 1 else tuple(given) or None


def _is_real(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, FakeTensor)


def _functional(name: str, args: Any) -> Any:
    """Return the result of a functional collective: a tensor of its shape, or its input for those in place."""
    x = args[0]
    if name == "wait_tensor" or name.endswith("_"):
        return x
    if name in ("all_reduce", "broadcast"):
        return torch.empty_like(x)
    rows = {
        "all_gather_into_tensor": lambda: x.shape[0] * args[1],
        "reduce_scatter_tensor": lambda: x.shape[0] // args[2],
        "all_to_all_single": lambda: sum(args[1]),
    }[name]()
    return x.new_empty((rows, *x.shape[1:]))


def _device_in_cpp(tensor: FakeTensor) -> torch.device:
    device = tensor.fake_device
    return META if tensor.fake_mode.in_kernel_invocation or device.type == "cuda" else device


class _Event:
    device = torch.device("cuda", 0)

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> _Event:
        return self

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class _Stream:
    device_index = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def record_event(self, *_: Any) -> _Event:
        return _Event()

    def synchronize(self) -> None: ...

    def is_capturing(self) -> bool:
        return False

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...


class _Generator(torch.Generator):
    """Nothing is drawn on the GPU, so one of the host serves."""

    def __new__(cls, device: Any = None) -> Any:
        return super().__new__(cls)


class _Properties:
    name = "NVIDIA H200"
    major, minor, multi_processor_count, total_memory, warp_size = 9, 0, 132, MEMORY, 32


class _RmsNorm(torch.autograd.Function):
    """A norm with the inputs and saved tensors of CUDA's fused kernel; elsewhere C++ composes it of
    operations."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _attention(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Replace attention by a fused kernel's, which keeps no scores."""

    def attention(q: Any, k: Any, v: Any, attn_mask: Any = None, **options: Any) -> Any:
        narrow = q.dtype in (torch.bfloat16, torch.float16)
        if q.device.type != "cuda" or not narrow or attn_mask is not None:
            return plain(q, k, v, attn_mask, **options)
        causal, scale = options.get("is_causal", False), options.get("scale")
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)[0]

    return attention


def _rms_norm(plain: Callable[..., Any]) -> Callable[..., Any]:
    def rms_norm(x: Any, shape: Any, weight: Any = None, eps: Any = None) -> Any:
        fused = x.device.type == "cuda" and weight is not None and not isinstance(weight, DTensor)
        return _RmsNorm.apply(x, weight) if fused else plain(x, shape, weight, eps)

    return rms_norm


def _softmax(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Replace softmax by a GPU's, in which the cast is a part of the kernel, not an operation of its own."""

    def softmax(x: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
        if x.device.type == "cuda" and dtype is torch.float32 and x.dtype != dtype:
            return aten._softmax(x, dim, True)
        return plain(x, dim=dim, _stacklevel=_stacklevel, dtype=dtype)

    return softmax


@contextmanager
def fake_gpu(index: int = 0) -> Iterator[FakeGpu]:
    """Have GPU `index` of a host of 8, whose tensors hold nothing, until the end of the `with` block."""
    for name in ("torch.distributed.fsdp", "torch.distributed.pipelining", "torch._dynamo"):
        import_module(name)  # they look at torch.cuda when they are imported
    device = torch.device("cuda", index)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    gpu = FakeGpu(device, mode)
    with pytest.MonkeyPatch.context() as patch:
        _patch_tensors(patch)
        _patch_cuda(patch, index)
        with mode, gpu:
            yield gpu


def _patch_tensors(patch: pytest.MonkeyPatch) -> None:
    inner = FakeTensor.__torch_dispatch__.__func__  # type: ignore[attr-defined]

    def dispatch(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE_OF:
            return _device_in_cpp(args[0])
        return inner(cls, func, types, args, kwargs or {})

    patch.setattr(fake, "init_gpu_context", lambda *_: None)
    patch.setitem(fake._DISPATCH_META_HANDLERS, _DEVICE_OF, lambda args: _device_in_cpp(args[0]))
    patch.setattr(FakeTensor, "__torch_dispatch__", classmethod(dispatch))
    patch.setattr(FakeTensor, "is_cuda", property(lambda it: it.device.type == "cuda"))
    patch.setattr(FakeTensor, "is_meta", property(lambda it: it.device.type == "meta"))
    for name in ("device", "is_cuda", "is_meta"):  # which C++ would tell of a DTensor
        seen = property(lambda it, name=name: getattr(it._local_tensor, name))  # type: ignore[misc]
        patch.setattr(DTensor, name, seen, raising=False)
    make = torch.Tensor._make_wrapper_subclass

    def wrapper(cls: Any, *args: Any, **kwargs: Any) -> Any:
        """C++ shall see `meta`, Python the device that was asked for: in FlatShard and in torchao's moments."""
        device = torch.device(kwargs.get("device") or "cpu")
        made = make(cls, *args, **kwargs | {"device": META if device.type == "cuda" else device})
        if device.type == "cuda" and "device" not in vars(cls):
            patch.setattr(cls, "device", property(lambda it: _device_within(it)), raising=False)
            on_gpu = property(lambda it: _device_within(it).type == "cuda")
            patch.setattr(cls, "is_cuda", on_gpu, raising=False)
        return made

    patch.setattr(torch.Tensor, "_make_wrapper_subclass", wrapper)


def _device_within(tensor: Any) -> torch.device:
    parts = getattr(tensor, "parts", None)
    if parts is None:
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return torch.device(parts[0].device)


def _patch_cuda(patch: pytest.MonkeyPatch, index: int) -> None:
    cuda = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: DEVICES,
        "current_device": lambda: index,
        "set_device": lambda *_: None,
        "synchronize": lambda *_: None,
        "get_device_name": lambda *_: _Properties.name,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_properties": lambda *_: _Properties,
        "is_bf16_supported": lambda *_, **__: True,
        "current_stream": lambda *_: _Stream(),
        "default_stream": lambda *_: _Stream(),
        "stream": lambda *_: nullcontext(),
        "device": lambda *_: nullcontext(),
        "is_current_stream_capturing": lambda: False,
        "Stream": _Stream,
        "Event": _Event,
    }
    for name, value in cuda.items():
        patch.setattr(torch.cuda, name, value)
    patch.setattr(torch, "Generator", _Generator)
    patch.setattr(torch.accelerator, "is_available", lambda: True)
    patch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: torch.device("cuda"))
    patch.setattr(torch.accelerator, "current_stream", lambda *_: _Stream())
    patch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    patch.setattr(torch.Tensor, "pin_memory", lambda it, *_: it)
    patch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    for name in ("pin_memory", "unpin_memory"):
        patch.setattr(f"nanoscale.checkpoint.staging.{name}", lambda *_: None)
    plain = torch.tensor

    def tensor(data: Any, **options: Any) -> Any:
        options.pop("pin_memory", None)
        device = options.pop("device", None)
        with unset_fake_temporarily():
            host = plain(data, **options)
        return host if device is None else host.to(device)

    patch.setattr(torch, "tensor", tensor)
    patch.setattr(F, "scaled_dot_product_attention", _attention(F.scaled_dot_product_attention))
    patch.setattr(F, "rms_norm", _rms_norm(F.rms_norm))
    patch.setattr(F, "softmax", _softmax(F.softmax))
    with suppress(ImportError):  # compiled, the update of 8-bit AdamW works in place
        patch.setattr(import_module("torchao.optim.adam"), "single_param_adam", lambda *_: None)
    ring: Any = import_module(
        "nanoscale.parallel.ring"
    )  # the operations' effects, not their results
    patch.setattr(ring, "_forward", ring._forward._init_fn)
    patch.setattr(ring, "_backward", ring._backward._init_fn)


def with_engine(
    config: Config, act: Callable[[NativeEngine, FakeGpu], T], *, rank: int = 0, steps: int = 2
) -> T:
    """Build the engine of one rank of a job on GPUs, take some steps, and return what `act` makes of it.

    `gpu.peak` is that of the last step then, bytes.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    sizes = derive(config)
    index = rank % DEVICES
    settings = {"RANK": rank, "LOCAL_RANK": index, "WORLD_SIZE": sizes.world_size}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setitem(os.environ, name, str(value))
        if sizes.world_size > 1:
            dist.init_process_group(
                "fake", rank=rank, world_size=sizes.world_size, store=FakeStore()
            )
        patch.setattr(torch, "compile", lambda function=None, **_: function or (lambda f: f))
        try:
            with fake_gpu(index) as gpu:
                engine = NativeEngine(config, gpu.device)
                gpu.built = True
                rows = np.zeros((sizes.micro_batch, config.train.seq_len + 1), dtype=np.int64)
                for _ in range(steps):
                    gpu.reset_peak()
                    engine.train_step([Batch.of_rows(rows)] * sizes.accumulation, 1e-4)
                return act(engine, gpu)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
