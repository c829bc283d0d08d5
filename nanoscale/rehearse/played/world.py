"""The played world of one rank: devices and other ranks that are not there.

nanoscale's own code runs unchanged on tensors with shapes, types and a device, but no numbers. Tensors of the
host are real. Memory is counted by storages, collectives are answered at once, and both are recorded.

Of a GPU, Python sees these tensors on `cuda:N`, and C++ sees them on `meta`: a build of PyTorch for CPUs has no
CUDA that autograd could ask for streams. Not counted are cuBLAS' workspaces and NCCL's buffers. Compiled
functions run eagerly.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch._subclasses.fake_tensor as fake
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._device import _device_constructors

from nanoscale.parallel import activation
from nanoscale.rehearse.played import collectives, cuda, kernels
from nanoscale.rehearse.played.allocator import Allocator, MemoryHistory, rounded
from nanoscale.rehearse.played.live_memory import OPENED, PLAIN, LiveMemory
from nanoscale.rehearse.played.loads import EvenLoads
from nanoscale.rehearse.played.patches import Patches
from nanoscale.rehearse.played.record import Call, PhaseMemory, Wait

aten = torch.ops.aten
META = torch.device("meta")
_DEVICE_OF = torch.ops.prim.device.default
_SCALAR = aten._local_scalar_dense.default
_WAITING = {_SCALAR: "item", aten.nonzero.default: "nonzero", aten.equal.default: "equal"}
_COPIES = {True: "copy to the host", False: "copy from the host"}
"""The name of a blocking copy, by whether its source is on the device."""
_OF_STORAGES = {getattr(aten.set_, name) for name in aten.set_.overloads() if "Storage" in name}
_EMPTY = aten.empty.memory_format
_LARGE = 1 << 26
"""Elements of a buffer of the host from which on it is without numbers: it might not fit into this machine."""
_FACTORIES = ("zeros", "ones", "empty", "full", "arange", "rand", "randn")
_PACKAGE = str(Path(__file__).parents[2])
_HERE = str(Path(__file__).parents[1])

KINDS = (
    "weights",
    "gathered weights",
    "gradients",
    "optimizer",
    "activations",
    "communication",
    "temporary",
)
_FIRST_KIND = {"build": 0, "load": 0, "resume": 3, "forward": 4, "update": 3}
"""The kind of a new tensor, by phase; in other phases it is temporary until it is known better."""


class World(LiveMemory):
    """The device of one rank and the other ranks. Stands above a FakeTensorMode."""

    def __init__(self, device: torch.device, mode: FakeTensorMode) -> None:
        super().__init__()
        self.device, self.mode = device, mode
        self.on_gpu = device.type == "cuda"
        self.patches = Patches()
        """The replacements of this world, which end with it."""
        self.built = False
        """True once the model has memory; until then its parameters are on the meta device."""
        self.section = "build"
        """The part of the rank's life, such as `step 1`."""
        self.updating = False
        """True during the optimizer's update."""
        self.repeat = 1
        """The number of equal micro batches for which the present one stands."""
        self.block = ""
        """The block of the model whose forward pass began last."""
        self.allocator = Allocator()
        self.history: MemoryHistory | None = None
        """A record of what the allocator does; None if nobody asks for it."""
        self.streams = cuda.Streams(self.wait)
        self.host_live = self.host_peak = 0
        self.calls: list[Call] = []
        self.groups: list[list[int]] = []
        self.waits: Counter[tuple[str, str, str]] = Counter()
        self.phases: dict[str, PhaseMemory] = {}
        self.timeline: list[int] = []
        self.keeps_timeline = False
        self.counts = True
        """False while DTensor derives the shape of a whole result: it makes tensors for it that no rank has."""
        self._group_numbers: dict[str, int] = {}
        self._kinds = [0] * len(KINDS)
        self._kind: dict[int, int] = {}
        self._hosted: set[int] = set()
        self._new_on_host = False
        self._aliases: set[int] = set()
        """Storages that stand for real ones of the host."""
        self._host_device: Callable[[Any], torch.device] = lambda storage: storage.device
        """PyTorch's own device of a storage."""
        self._weak: dict[int, StorageWeakRef] = {}
        """Storages to which weak references of C++ exist, which keep their Python objects."""
        self._among_host = 0

    # What phase it is

    @property
    def phase(self) -> str:
        """The part of the rank's life, and within a step forward, backward or update."""
        if not self.section.startswith("step"):
            return self.section
        if torch._C._current_graph_task_id() != -1:
            return "backward"
        return "update" if self.updating else "forward"

    @contextmanager
    def part(self, section: str) -> Iterator[None]:
        """Name a part of the rank's life."""
        before, self.section = self.section, section
        try:
            yield
        finally:
            self.section = before

    # Operations

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE_OF:
            return self._device_in_cpp(args[0])
        for kind in types:
            if kind not in PLAIN:
                return NotImplemented  # it calls operations on plain tensors, which come back here
        if func in OPENED:
            return self.open(func, args)
        if func.namespace in collectives.NAMESPACES:
            return self._communicate(func, args)
        if kwargs:
            if "pin_memory" in kwargs:
                kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
            if self.built and self.on_gpu and kwargs.get("device") == META:
                kwargs["device"] = self.device  # autograd asked C++ for a device and gives it back
        else:
            kwargs = {}
        tensors: list[Tensor] = []
        _collect(args, tensors)
        if kwargs:
            _collect(kwargs.values(), tensors)
        fakes = sum(isinstance(tensor, FakeTensor) for tensor in tensors)
        if not fakes and self._is_of_the_host(tensors, kwargs.get("device")):
            large = func is _EMPTY and prod(args[0]) > _LARGE and kwargs.get("device") != META
            with self.mode if large else unset_fake_temporarily():
                result = func(*args, **kwargs)
            self._see_all(result)
            return result
        if self.on_gpu:
            self._note_wait(func, tensors, args, kwargs)
        if func is _SCALAR:
            return torch.zeros((), dtype=tensors[0].dtype).item() if not fakes else 1
        if fakes < len(tensors):
            # Real tensors without their values: with values a FakeTensorMode would compute.
            args = _mapped(self._fake, args)
            kwargs = {name: _mapped(self._fake, value) for name, value in kwargs.items()}
        # The cache of FakeTensorMode keeps an operation's arguments: these would be storages.
        self.mode.cache_enabled = func not in _OF_STORAGES
        if func in _OF_STORAGES and not self.on_gpu:
            args = (args[0], self._alias(args[1]), *args[2:])
        result = func(*args, **kwargs)
        self._see_all(result)
        return result

    def _device_in_cpp(self, tensor: Any) -> torch.device:
        if not isinstance(tensor, FakeTensor):
            return _DEVICE_OF(tensor)
        return _device_in_cpp(tensor)

    def _is_of_the_host(self, tensors: list[Tensor], device: Any) -> bool:
        if self._among_host:
            return True
        if device is None:
            return True
        kind = torch.device(device).type
        if self.on_gpu or kind == "meta":
            return kind in ("cpu", "meta")
        # On a CPU, memory that is asked for by name of the device is the device's.
        return kind == "cpu" and bool(tensors) and not all(t.is_meta for t in tensors)

    @contextmanager
    def among_host(self) -> Iterator[None]:
        """Make tensors that are real and of the host."""
        self._among_host += 1
        try:
            with unset_fake_temporarily():
                yield
        finally:
            self._among_host -= 1

    def _fake(self, tensor: Tensor) -> Tensor:
        """Return a tensor without numbers, which stands for a real one of the host, whose memory is counted."""
        if isinstance(tensor, FakeTensor):
            return tensor
        alias = self.mode.from_tensor(tensor)
        self._note_alias(alias.untyped_storage(), None)
        return alias

    # Memory

    def _see_all(self, result: Any) -> None:
        if not self.counts:
            return
        if isinstance(result, Tensor):
            self._see(result)
        elif isinstance(result, (list, tuple)):
            for one in result:
                self._see_all(one)

    def _see(self, tensor: Any) -> None:
        if isinstance(tensor, FakeTensor):
            self._new_on_host = self.on_gpu and tensor.fake_device.type == "cpu"
            if tensor.fake_device.type != "meta":
                self.see_storage(tensor.untyped_storage())
        elif type(tensor) in PLAIN and not tensor.is_meta:
            self._new_on_host = self.on_gpu
            self.see_storage(tensor.untyped_storage())

    def uncounted(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same, but whose tensors are not counted."""

        def act(*args: Any, **options: Any) -> Any:
            before, self.counts = self.counts, False
            try:
                return plain(*args, **options)
            finally:
                self.counts = before

        return act

    def watch_weak_references(self, patches: Patches) -> None:
        """Notice the end of storages to which the code for offloading keeps weak references."""
        weak = self._weak

        class Noted(StorageWeakRef):
            def __init__(self, storage: Any) -> None:
                super().__init__(storage)
                weak[storage._cdata] = self

        patches.replace(activation, "StorageWeakRef", Noted)

    def forget_expired(self) -> None:
        """Count storages no longer that only weak references keep."""
        for key, reference in list(self._weak.items()):
            if reference.expired():
                del self._weak[key]
                known = self._held.pop(key, None)
                if known is not None:
                    self._change(key, known[1], 0)

    def resized(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._held:
            if self._held[key][1] == 0 and key in self._kind:
                self._move(key, 1)  # FSDP2 gathers parameters into it
            self.see_storage(storage)

    def _size(self, storage: torch.UntypedStorage) -> int:
        return rounded(storage.nbytes()) if self.on_gpu else storage.nbytes()

    def _change(self, key: int, before: int, after: int) -> None:
        if key in self._hosted or (self._new_on_host and key not in self._kind):
            self._change_host(key, before, after)
            return
        if self._weak and after > before:
            self.forget_expired()
        phase = self.phase
        if key not in self._kind:
            self._kind[key] = _FIRST_KIND.get(phase, 6)
        kind = self._kind[key]
        self._kinds[kind] += after - before
        if self.on_gpu:
            freed = self.allocator.give(key)
            allocated = self.allocator.take(key, after, self.streams.current)
            if self.history is not None:
                self.history.change(freed, allocated, self.streams.current, KINDS[kind])
        super()._change(key, before, after)
        if self.keeps_timeline:
            self.timeline.append(self.live)
        if after == 0 and key not in self._held:
            del self._kind[key]
        known = self.phases.get(phase)
        if known is None:
            known = self.phases[phase] = PhaseMemory()
        if self.live > known.peak:
            known.peak = self.live
            known.kinds = dict(zip(KINDS, self._kinds, strict=True))

    def _change_host(self, key: int, before: int, after: int) -> None:
        self.host_live += after - before
        self.host_peak = max(self.host_peak, self.host_live)
        self._hosted.add(key)
        if key not in self._held:
            self._hosted.discard(key)

    def bytes_of(self, tensor: Tensor) -> int:
        """Return the bytes of a tensor's memory on the device."""
        known = self._held.get(tensor.untyped_storage()._cdata)
        return 0 if known is None else known[1]

    def is_of_kind(self, tensor: Tensor, kind: str) -> None:
        """Note the purpose of a tensor's memory."""
        self._move(tensor.untyped_storage()._cdata, KINDS.index(kind))

    def _move(self, key: int, kind: int) -> None:
        before = self._kind.get(key)
        if before is not None and before != kind:
            size = self._held[key][1]
            self._kinds[before] -= size
            self._kinds[kind] += size
            self._kind[key] = kind

    # Collectives

    def _communicate(self, func: Any, args: Any) -> Any:
        found = collectives.described(func, args)
        result = collectives.answer(func, args)
        if func.namespace == "_c10d_functional":
            self._see_all(result)
        if found is not None:
            self._note_call(found)
        return result

    def _note_call(self, found: collectives.Collective) -> None:
        for tensor in found.tensors:
            key = tensor.untyped_storage()._cdata
            if self._kind.get(key) in (4, 6):
                self._move(key, 5)
        phase, line = self.section, _line()
        self.calls.append(
            Call(
                found.kind,
                self._number(found.group),
                found.bytes,
                found.dtype,
                found.peer,
                phase,
                self.repeat,
                self.block,
                line,
            )
        )

    def _number(self, group: dist.ProcessGroup | None) -> int:
        name = group.group_name if group is not None else ""
        if name not in self._group_numbers:
            members = [] if group is None else dist.get_process_group_ranks(group)
            self._group_numbers[name] = len(self.groups)
            self.groups.append(list(members))
        return self._group_numbers[name]

    # Waits

    def wait(self, what: str) -> None:
        """Note that the host waits for the device."""
        self.waits[self.section, what, _line()] += self.repeat

    def _note_wait(
        self, func: Any, tensors: list[Tensor], args: Any, kwargs: dict[str, Any]
    ) -> None:
        if func in _WAITING:
            if _is_on_gpu(tensors[0]):
                self.wait(_WAITING[func])
        elif func is aten._to_copy.default:
            device = kwargs.get("device")
            moves = device is not None and torch.device(device).type != tensors[0].device.type
            if moves and not kwargs.get("non_blocking") and not tensors[0].is_meta:
                self.wait(_COPIES[_is_on_gpu(tensors[0])])
        elif func is aten.copy_.default and len(tensors) == 2:
            blocks = not (args[2:] or [kwargs.get("non_blocking")])[0]
            if blocks and _is_on_gpu(tensors[0]) != _is_on_gpu(tensors[1]):
                self.wait(_COPIES[_is_on_gpu(tensors[1])])

    def _alias(self, storage: Any) -> Any:
        """Return a storage without numbers in place of a real one of the host, which is counted already."""
        if self._host_device(storage).type == "meta":
            return storage
        alias = torch.UntypedStorage(storage.nbytes(), device="meta")
        self._note_alias(alias, storage)
        return alias

    def _note_alias(self, alias: Any, storage: Any) -> None:
        """Let a storage not be counted; while it lives it holds the one for which it stands."""
        if alias._cdata not in self._aliases:
            self._aliases.add(alias._cdata)
            weakref.finalize(alias, self._end_alias, alias._cdata, storage)

    def _end_alias(self, key: int, _: Any) -> None:
        self._aliases.discard(key)

    def see_storage(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._aliases:
            super().see_storage(storage)

    def device_of(self, storage: Any, usual: torch.device) -> torch.device:
        """Return the device of a storage: those of tensors without numbers are on `meta`."""
        key = storage._cdata
        if usual.type != "meta" or key not in self._held:
            return usual
        return torch.device("cpu") if key in self._hosted else self.device

    def recorded_waits(self) -> list[Wait]:
        return [Wait(*place, count) for place, count in self.waits.items()]


def _is_on_gpu(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor) and tensor.fake_device.type == "cuda"


def _collect(values: Any, tensors: list[Tensor]) -> None:
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            _collect(value, tensors)


def _mapped(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(change, one) for one in value)
    return value


def _line() -> str:
    """Return the line of nanoscale's code that is running, or of the caller outside of PyTorch."""
    frame, other = sys._getframe(2), ""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_PACKAGE):
            if not file.startswith(_HERE):
                return f"{file.removeprefix(_PACKAGE).lstrip('/')}:{frame.f_lineno}"
        elif not other and "/torch/" not in file and not file.startswith("<"):
            other = f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return other


def _device_in_cpp(tensor: FakeTensor) -> torch.device:
    device = tensor.fake_device
    return META if tensor.fake_mode.in_kernel_invocation or device.type == "cuda" else device


@contextmanager
def played(
    device: torch.device, gpu: cuda.Gpu | None, experts: tuple[int, int] = (0, 1)
) -> Iterator[World]:
    """Have a device whose tensors hold nothing, until the end of the `with` block.

    Args:
        gpu: a description of the device if it is a GPU.
        experts: this rank's number among those of ep, and how many they are.
    """
    for name in ("torch.distributed.fsdp", "torch.distributed.pipelining", "torch._dynamo"):
        import_module(name)  # they look at torch.cuda when they are imported
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    world = World(device, mode)
    with Patches() as patches:
        _patch_tensors(patches)
        patches.replace(torch, "compile", lambda function=None, **_: function or (lambda f: f))
        collectives.hold_tensors(patches, on_gpu=gpu is not None)
        EvenLoads(*experts, world.wait if gpu is not None else lambda _: None).patch(patches)
        if gpu is not None:
            assert device.index is not None
            cuda.pretend(patches, gpu, device.index, world)
            world.streams.patch(patches, device.index)
            kernels.use_fused_kernels(patches)
        world.watch_weak_references(patches)
        patches.wrap(ShardingPropagator, "_propagate_tensor_meta_non_cached", world.uncounted)
        usual: Any = torch.UntypedStorage.device
        world._host_device = usual.__get__
        device_of = property(lambda it: world.device_of(it, usual.__get__(it)))
        patches.replace(torch.UntypedStorage, "device", device_of)
        _make_host_tensors_real(patches, world)
        world.patches = patches
        with mode, world:
            yield world


def _make_host_tensors_real(patches: Patches, world: World) -> None:
    plain = torch.tensor

    def tensor(data: Any, **options: Any) -> Any:
        options.pop("pin_memory", None)
        device = options.pop("device", None)
        with world.among_host():
            host = plain(data, **options)
        return host if device is None else host.to(device)

    patches.replace(torch, "tensor", tensor)
    patches.replace(FakeTensor, "data_ptr", lambda _: 0)
    if world.on_gpu:
        return

    def host_factory(make: Callable[..., Any]) -> Callable[..., Any]:
        def factory(*args: Any, **options: Any) -> Any:
            if options.get("device") is not None:
                return make(*args, **options)
            with world.among_host():
                return make(*args, **options)

        return factory

    _device_constructors()  # `with torch.device(…)` keeps the functions that it finds at first
    for name in _FACTORIES:
        patches.wrap(torch, name, host_factory)


def _patch_tensors(patches: Patches) -> None:
    inner = FakeTensor.__torch_dispatch__.__func__  # type: ignore[attr-defined]

    def dispatch(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE_OF:
            return _device_in_cpp(args[0])
        return inner(cls, func, types, args, kwargs or {})

    patches.replace(fake, "init_gpu_context", lambda *_: None)
    handlers = fake._DISPATCH_META_HANDLERS
    patches.replace_item(handlers, _DEVICE_OF, lambda args: _device_in_cpp(args[0]))
    patches.replace(FakeTensor, "__torch_dispatch__", classmethod(dispatch))
    patches.replace(FakeTensor, "is_cuda", property(lambda it: it.device.type == "cuda"))
    patches.replace(FakeTensor, "is_meta", property(lambda it: it.device.type == "meta"))
    for name in ("device", "is_cuda", "is_meta"):  # which C++ would report of a DTensor
        seen = property(lambda it, name=name: getattr(it._local_tensor, name))  # type: ignore[misc]
        patches.replace(DTensor, name, seen)
    make = torch.Tensor._make_wrapper_subclass

    def wrapper(cls: Any, *args: Any, **kwargs: Any) -> Any:
        """C++ shall see `meta`, Python the device that was asked for: in FlatShard and torchao's moments."""
        device = torch.device(kwargs.get("device") or "cpu")
        made = make(cls, *args, **kwargs | {"device": META if device.type == "cuda" else device})
        if device.type == "cuda" and "device" not in vars(cls):
            patches.replace(cls, "device", property(lambda it: _device_within(it)))
            on_gpu = property(lambda it: _device_within(it).type == "cuda")
            patches.replace(cls, "is_cuda", on_gpu)
        return made

    patches.replace(torch.Tensor, "_make_wrapper_subclass", wrapper)


def _device_within(tensor: Any) -> torch.device:
    parts = getattr(tensor, "parts", None)
    if parts is None:
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return torch.device(parts[0].device)


def _of_no_backend(make: Callable[..., Any]) -> Callable[..., Any]:
    """Have groups of another backend played too."""
    return lambda *args, **options: make(*args, **options | {"backend": "fake"})


@contextmanager
def identity(rank: int, world_size: int, devices: int) -> Iterator[None]:
    """Be rank `rank` of a world of which no other rank is there, until the end of the `with` block."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    settings = {
        "RANK": rank,
        "LOCAL_RANK": rank % devices,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": min(devices, world_size),
    }
    with Patches() as patches:
        for name, value in settings.items():
            patches.replace_item(os.environ, name, str(value))
        if world_size > 1:
            dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        patches.wrap(dist, "new_group", _of_no_backend)
        try:
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
