"""The simulated world of one rank: its device, and the other ranks, do not exist.

nanoscale's code runs unchanged on tensors that have a shape, a dtype and a device, but no numbers. Tensors in
host memory are real. Memory is counted by storages. Collectives return at once. The record holds both.

Python sees the tensors of a GPU on `cuda:N`, and C++ sees them on `meta`, because a build of PyTorch for CPUs
has no CUDA that could give autograd a stream. The workspaces of cuBLAS and the buffers of NCCL are not counted.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
    unset_fake_temporarily,
)
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._pytree import tree_map_only

from nanoscale.common.versions import missing
from nanoscale.rehearse.played import collectives, compiled, cuda, fake_tensors
from nanoscale.rehearse.played.device_memory import DeviceMemory, TensorKind
from nanoscale.rehearse.played.live_memory import OPENED, PLAIN
from nanoscale.rehearse.played.patches import Patches
from nanoscale.rehearse.played.record import HOST, Call, RankRecord, StreamEvent, calling_line
from nanoscale.rehearse.played.work import Work, tensors_of, work_of

aten = torch.ops.aten
_SCALAR = aten._local_scalar_dense.default
_WAITING = {_SCALAR: "item", aten.nonzero.default: "nonzero", aten.equal.default: "equal"}
"""Operations for which the host waits, with their names in PyTorch."""
_WAIT_TENSOR = torch.ops._c10d_functional.wait_tensor.default
_OF_STORAGES = {getattr(aten.set_, name) for name in aten.set_.overloads() if "Storage" in name}
_COMMUNICATED = (TensorKind.ACTIVATIONS, TensorKind.TEMPORARY)
"""The kinds of tensors that are counted as communication once a collective reads or writes them."""
_CPU = torch.device("cpu")
_EMPTY = aten.empty.memory_format
_LARGE = 1 << 26
"""Larger tensors in host memory, counted in elements, are fake: they might not fit into this machine."""
_BUILDING = ("build", "load")
"""The sections in which models are built on the meta device."""
_ALLOCATIONS = ("empty_strided", "zeros", "empty_like", "zeros_like", "new_empty")
_NEW = {_EMPTY, *(getattr(aten, name).default for name in _ALLOCATIONS)}
_VIEWS = ("detach", "alias", "as_strided", "view", "t")
_SIMPLE = _NEW | {aten.slice.Tensor, *(getattr(aten, name).default for name in _VIEWS)}
"""New tensors and views, for which the checks and the cache of FakeTensorMode take most of the time."""
_LOSSES = (aten.nll_loss_forward.default, aten.nll_loss_backward.default)
"""Operations that FakeTensorMode replaces by others; one of the others asks C++ for the device."""


def _loss(func: Any, args: Any) -> Any:
    if func is aten.nll_loss_backward.default:
        return torch.empty_like(args[1])
    log_probabilities, targets, _weights, reduction, _ignored = args
    loss = log_probabilities.new_empty(() if reduction else targets.shape)
    return loss, log_probabilities.new_empty(())


_GENERATOR = 5056
"""Bytes of the state of a random generator of a CPU."""


class World(DeviceMemory):
    """The device of one rank and the other ranks, as a mode that is entered after a FakeTensorMode."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let the compiler trace functions while this mode is active."""
        return True

    supports_higher_order_operators = True

    def __init__(
        self, device: torch.device, mode: FakeTensorMode, patches: Patches, record: RankRecord
    ) -> None:
        super().__init__(device, record)
        self.mode = mode
        self.patches = patches
        """Replacements that last as long as this world."""
        self.repeat = 1
        """The number of equal micro batches for which the present one stands."""
        self._block = "", ""
        """The block of the model whose forward pass began last, and the phase in which it did."""
        self.kernels: list[Any] = []
        """The kernels that Inductor wrote (`played.compiled`)."""
        self.lines: dict[str, dict[str, None]] = {}
        """The lines of the model that each kernel computes, by the kernel's name."""
        self.waits: Counter[tuple[str, str, str]] = Counter()
        """The number of waits, by section, operation and line."""
        self._group_numbers: dict[str, int] = {}
        """The index of each process group in the record, by the group's name."""
        self._pending: dict[int, tuple[int, Any]] = {}
        """The index of the call and the work, by the address of the work or of a functional result."""
        self.last: dict[int, int] = {}
        """The index of the last event of each stream."""
        self._makes_host_tensors = False
        self._works: dict[Work, int] = {}
        self._segments: dict[tuple[int, ...], int] = {}
        self._segment: list[int] = []
        self._segment_stream = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if isinstance(func, HigherOrderOperator):
            return self._run_with_generator(func, args, kwargs or {})
        if func is fake_tensors.DEVICE_OF:
            fake = isinstance(args[0], FakeTensor)
            return fake_tensors.device_in_cpp(args[0]) if fake else fake_tensors.DEVICE_OF(args[0])
        for kind in types:
            if kind not in PLAIN:
                return NotImplemented  # the type calls operations on plain tensors, which come back here
        if func in OPENED:
            return self.open(func, args)
        if func.namespace in collectives.NAMESPACES:
            return self._communicate(func, args)
        if self.section.startswith("step") and func.namespace != "profiler":
            self.record.operations += self.repeat
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        device = kwargs.get("device")
        if self.on_gpu and device == fake_tensors.META and self.section not in _BUILDING:
            # Autograd passes on the device that C++ reported.
            device = kwargs["device"] = self.device
        tensors = tensors_of([*args, *kwargs.values()])
        fakes = sum(isinstance(tensor, FakeTensor) for tensor in tensors)
        if not fakes and self._is_in_host_memory(tensors, device):
            large = func is _EMPTY and prod(args[0]) > _LARGE and device != fake_tensors.META
            # Offloaded parameters have no numbers either.
            large = large or (self.on_gpu and device == _CPU and any(t.is_meta for t in tensors))
            with self.mode if large else unset_fake_temporarily():
                result = func(*args, **kwargs)
            self.see_all(result)
            return result
        if self.on_gpu:
            self._record_wait(func, tensors, args, kwargs)
        if func is _SCALAR:
            return torch.zeros((), dtype=tensors[0].dtype).item() if not fakes else 1
        if func is aten.nonzero.default and fakes:  # at most all elements are chosen
            return tensors[0].new_empty((tensors[0].numel(), tensors[0].ndim), dtype=torch.int64)
        if func is aten.index.Tensor and fakes:
            args = (args[0], [part for index in args[1] for part in _without_mask(index)])
        if fakes < len(tensors):
            # FakeTensorMode would compute with the values of real tensors.
            args, kwargs = tree_map_only(Tensor, self._without_numbers, (args, kwargs))
        # The cache of FakeTensorMode would keep the arguments of an operation: storages.
        self.mode.cache_enabled = func not in _OF_STORAGES
        if func in _OF_STORAGES and not self.on_gpu:
            args = (args[0], self._storage_without_numbers(args[1]), *args[2:])
        if func._overloadname == "out" and kwargs["out"].numel():
            # It has the right size in compiled code, also where PyTorch has no rule.
            result = kwargs["out"]
        elif func in _SIMPLE and (fakes or device != fake_tensors.META):
            device = device or args[0].fake_device
            options = kwargs | {"device": fake_tensors.META} if func in _NEW else kwargs
            with in_kernel_invocation_manager(self.mode):
                result = FakeTensor(self.mode, func(*args, **options), device)
        else:
            result = _loss(func, args) if func in _LOSSES else func(*args, **kwargs)
        self.see_all(result)
        if self.keeps_timeline:
            self.add_work(work_of(func, tensors, args, kwargs, result))
        return result

    def _run_with_generator(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation of compiled code that draws numbers, or would, such as attention."""
        kwargs.pop("rng_state", None)
        run, *rest = args if callable(args[0]) else args[1:]
        result = run(*rest, **kwargs)
        if self.keeps_timeline:
            self.add_work(work_of(run, tensors_of(rest), rest, kwargs, result))
        if func.name() == "run_and_save_rng_state":
            result = torch.empty(_GENERATOR, dtype=torch.uint8), result
        self.see_all(result)
        return result

    # Tensors in host memory

    def _is_in_host_memory(self, tensors: list[Tensor], device: Any) -> bool:
        """Return True if an operation on real tensors has a real result in host memory."""
        if self._makes_host_tensors or device is None:
            return True
        kind = torch.device(device).type
        if self.on_gpu or kind == "meta":
            return kind in ("cpu", "meta")
        # In a job on CPUs, a new tensor with an explicit device is on the simulated device.
        return kind == "cpu" and bool(tensors) and not all(t.is_meta for t in tensors)

    @contextmanager
    def in_host(self) -> Iterator[None]:
        """Make all new tensors real, in host memory, until the `with` block ends."""
        before, self._makes_host_tensors = self._makes_host_tensors, True
        try:
            with unset_fake_temporarily():
                yield
        finally:
            self._makes_host_tensors = before

    def _without_numbers(self, tensor: Tensor) -> Tensor:
        """Return a fake tensor in place of a real one, whose memory is already counted."""
        if isinstance(tensor, FakeTensor):
            return tensor
        alias = self.mode.from_tensor(tensor)
        self.add_alias(alias.untyped_storage())
        return alias

    def _storage_without_numbers(self, storage: Any) -> Any:
        """Return a meta storage in place of a real one, whose memory is already counted."""
        if _real_device(storage).type == "meta":
            return storage
        alias = torch.UntypedStorage(storage.nbytes(), device="meta")
        self.add_alias(alias, storage)
        return alias

    # Collectives

    def begin_block(self, name: str) -> None:
        """Set the block of the following calls, until another phase begins."""
        self._block = name, self.phase

    def _communicate(self, func: Any, args: Any) -> Any:
        collective, work = collectives.described(func, args), FakeWork()
        result = collectives.answer(func, args, work)
        if func.namespace == "_c10d_functional":
            self.see_all(result)
            work = result[0] if isinstance(result, list) else result
        if collective is None and func is _WAIT_TENSOR:
            self.wait_for(args[0])
        elif collective is not None:
            for tensor in collective.tensors:
                new = TensorKind.COMMUNICATION
                self.set_kind(tensor.untyped_storage()._cdata, new, _COMMUNICATED)
            held = None if isinstance(work, Tensor) else work
            self._pending[_address(work)] = len(self.record.calls), held
            self.add_event("call", len(self.record.calls))
            self._record_call(collective)
        return result

    def wait_for(self, work: Any) -> bool:
        """Record that the present stream waits for a work, or for the result of a functional collective."""
        number, _ = self._pending.pop(_address(work), (None, None))
        if number is not None:
            self.add_event("wait", number)
        return True

    def add_work(self, work: Work | None) -> None:
        """Record an operation of the present stream; None: an operation that starts no kernel."""
        if work is None:
            return
        if self._segment and self._segment_stream != self.stream:
            self.end_segment()
        self._segment_stream = self.stream
        if work not in self._works:
            self._works[work] = len(self.record.works)
            self.record.works.append(work)
        self._segment.append(self._works[work])

    def end_segment(self) -> None:
        """End the operations before an event."""
        segment, self._segment = tuple(self._segment), []
        if segment and segment not in self._segments:
            self._segments[segment] = len(self.record.segments)
            self.record.segments.append(list(segment))
        if segment:
            self.last[self._segment_stream] = len(self.record.events)
            event = StreamEvent(self._segment_stream, "work", self._segments[segment])
            self.record.events.append(event)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Record the work of the block, which is the last step."""
        first, self.keeps_timeline = len(self.record.events), True
        try:
            yield
        finally:
            self.end_segment()
            self.keeps_timeline = False
            self.record.step_events = first, len(self.record.events)

    def begin_batch(self, repeat: int) -> None:
        """Set the number of equal micro batches for which the next one stands."""
        self.repeat = repeat
        if self.keeps_timeline:
            self.add_event("batch", repeat, 0)

    def add_event(self, what: str, of: int, stream: int | None = None) -> None:
        """Record an event of a stream, by default the present one; nothing if it refers to no event."""
        self.end_segment()
        if of >= 0:
            stream = self.stream if stream is None else stream
            self.last[stream] = len(self.record.events)
            self.record.events.append(StreamEvent(stream, what, of))

    def _record_call(self, collective: collectives.Collective) -> None:
        group, groups = collective.group, self.record.groups
        name = "" if group is None else group.group_name
        if name not in self._group_numbers:
            self._group_numbers[name] = len(groups)
            groups.append([] if group is None else dist.get_process_group_ranks(group))
        self.record.calls.append(
            Call(
                kind=collective.kind,
                group=self._group_numbers[name],
                bytes=collective.bytes,
                dtype=collective.dtype,
                peer=collective.peer,
                phase=self.section,
                repeat=self.repeat,
                block=self._block[0] if self._block[1] == self.phase else "",
                line=calling_line(),
                reduction=collective.reduction,
                sent=collective.sent,
                received=collective.received,
            )
        )

    # Waits

    def wait(self, operation: str, event: int | None = None) -> None:
        """Record that the host waits for the device: for an event, or else for the present stream."""
        self.waits[self.section, operation, calling_line()] += self.repeat
        self.end_segment()
        at = self.last.get(self.stream, -1) if event is None else event
        self.add_event("after", at, HOST)

    def _record_wait(
        self, func: Any, tensors: list[Tensor], args: Any, kwargs: dict[str, Any]
    ) -> None:
        if func in _WAITING:
            if _is_on_gpu(tensors[0]):
                self.wait(_WAITING[func])
        elif func is aten.index.Tensor:
            if any(_is_mask(index) and _is_on_gpu(index) for index in args[1]):
                self.wait("nonzero")
        elif func is aten._to_copy.default:
            device = kwargs.get("device")
            moves = device is not None and torch.device(device).type != tensors[0].device.type
            if moves and not kwargs.get("non_blocking") and not tensors[0].is_meta:
                self._wait_for_copy(tensors[0])
        elif func is aten.copy_.default and len(tensors) == 2:
            blocks = not (args[2:] or [kwargs.get("non_blocking")])[0]
            if blocks and _is_on_gpu(tensors[0]) != _is_on_gpu(tensors[1]):
                self._wait_for_copy(tensors[1])

    def _wait_for_copy(self, source: Tensor) -> None:
        self.wait("copy to the host" if _is_on_gpu(source) else "copy from the host")


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _without_mask(index: Any) -> list[Any]:
    """Return the positions, by dimension, that a mask chooses, which are at most all; else the index itself."""
    if not _is_mask(index):
        return [index]
    return list(index.new_empty((index.ndim, index.numel()), dtype=torch.int64).unbind())


def _address(work: Any) -> int:
    """Return the address of a work, or of the storage of a functional collective's result."""
    return int(work.untyped_storage()._cdata) if isinstance(work, Tensor) else id(work)


def _is_on_gpu(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor) and tensor.fake_device.type == "cuda"


_storage_device: Any = torch.UntypedStorage.device
_real_device: Callable[[Any], torch.device] = _storage_device.__get__
"""Return the device of a storage that PyTorch itself reports."""


@contextmanager
def played(
    device: torch.device, gpu: cuda.Gpu | None, experts: tuple[int, int], record: RankRecord
) -> Iterator[World]:
    """Simulate a device whose tensors hold no numbers, until the `with` block ends.

    Args:
        gpu: the description of the device; None for a CPU.
        experts: this rank's number in the expert-parallel group, and the size of this group.
        record: the record of the rank, to which the world adds.
    """
    for name in ("torch.distributed.fsdp", "torch.distributed.pipelining", "torch._dynamo"):
        import_module(name)  # these modules read torch.cuda when they are imported
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    on_gpu = gpu is not None
    with Patches() as patches:
        world = World(device, mode, patches, record)
        fake_tensors.report_devices(patches, mode, device)
        collectives.hold_tensors(patches, on_gpu=on_gpu)
        patches.replace(FakeWork, "wait", lambda work, *_: world.wait_for(work))
        wait = world.wait if on_gpu else lambda _: None
        fake_tensors.read_on_host(patches, wait, world.in_host)
        fake_tensors.balance_experts(patches, *experts, wait)
        if gpu is not None:
            cuda.pretend(patches, gpu, world)
            cuda.use_fused_kernels(patches)
        if not missing("triton"):
            compiled.patch(patches, world, gpu)
        else:
            patches.replace(torch, "compile", lambda function=None, **_: function)
        world.watch_weak_references(patches)
        # DTensor derives the shape of a global result from tensors that no rank has.
        patches.wrap(ShardingPropagator, "_propagate_tensor_meta_non_cached", world.uncounted)
        device_of = property(lambda self: world.device_of(self, _real_device(self)))
        patches.replace(torch.UntypedStorage, "device", device_of)
        fake_tensors.make_host_tensors_real(patches, world.in_host, device if on_gpu else None)
        with mode, world:
            yield world
