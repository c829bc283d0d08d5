"""The memory of a simulated device, by phase of the rank's life and by kind of tensor."""

import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

from nanoscale.parallel import activation
from nanoscale.rehearse.played.allocator import Allocator, MemoryHistory, rounded
from nanoscale.rehearse.played.live_memory import PLAIN, LiveMemory
from nanoscale.rehearse.played.patches import Patches
from nanoscale.rehearse.played.record import PhaseMemory, RankRecord


class TensorKind(StrEnum):
    """The purpose of a tensor on the device."""

    WEIGHTS = "weights"
    GATHERED_WEIGHTS = "gathered weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    COMMUNICATION = "communication"
    TEMPORARY = "temporary"


_NEW_KIND = {
    "build": TensorKind.WEIGHTS,
    "load": TensorKind.WEIGHTS,
    "resume": TensorKind.OPTIMIZER,
    "forward": TensorKind.ACTIVATIONS,
    "update": TensorKind.OPTIMIZER,
}
"""The kind of a new tensor, by phase. In other phases a new tensor is temporary until its kind is set."""


class DeviceMemory(LiveMemory):
    """The memory of a simulated device by phase and by kind of tensor, and the tensors in host memory."""

    def __init__(self, device: torch.device, record: RankRecord) -> None:
        super().__init__()
        self.device, self.record = device, record
        self.on_gpu = device.type == "cuda"
        self.section = "build"
        """The present section of the rank's life, such as `step 1`."""
        self.updating = False
        """True during the optimizer's update."""
        self.allocator = Allocator()
        self.stream = 0
        """The number of the present CUDA stream. The default stream is 0."""
        self.history: MemoryHistory | None = None
        """The record of every allocation; None if no snapshot is written."""
        self.keeps_timeline = False
        self._counts = True
        self.host_live = 0
        self._kinds: dict[int, TensorKind | None] = {}
        """The kind of each storage, by its address; None if it is in host memory."""
        self._kind_bytes: dict[str, int] = dict.fromkeys(TensorKind, 0)
        self._new_in_host = False
        """True if a new storage is in host memory."""
        self._aliases: set[int] = set()
        """Addresses of storages without numbers that replace real storages in host memory."""
        self._weak: dict[int, StorageWeakRef] = {}
        """Weak references of C++ to storages, by the storage's address. They keep the Python objects alive."""

    # The phase

    @property
    def phase(self) -> str:
        """The section of the rank's life; within a step `forward`, `backward` or `update`."""
        if not self.section.startswith("step"):
            return self.section
        if torch._C._current_graph_task_id() != -1:
            return "backward"
        return "update" if self.updating else "forward"

    @contextmanager
    def during(self, section: str) -> Iterator[None]:
        """Set the section of the rank's life until the `with` block ends."""
        before, self.section = self.section, section
        try:
            yield
        finally:
            self.section = before

    # Which storages are counted

    def see_all(self, result: Any) -> None:
        """Count the storages of an operation's result."""
        if not self._counts:
            return
        if isinstance(result, (list, tuple)):
            for item in result:
                self.see_all(item)
        elif isinstance(result, FakeTensor):
            self._new_in_host = self.on_gpu and result.fake_device.type == "cpu"
            if result.fake_device.type != "meta":
                self.see_storage(result.untyped_storage())
        elif type(result) in PLAIN and not result.is_meta:
            self._new_in_host = self.on_gpu
            self.see_storage(result.untyped_storage())

    def see_storage(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._aliases:
            super().see_storage(storage)

    def uncounted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same without counting its tensors."""

        def call(*args: Any, **options: Any) -> Any:
            before, self._counts = self._counts, False
            try:
                return function(*args, **options)
            finally:
                self._counts = before

        return call

    def add_alias(self, alias: Any, storage: Any = None) -> None:
        """Do not count a storage that replaces a real one; keep the real one alive while the alias lives."""
        if alias._cdata not in self._aliases:
            self._aliases.add(alias._cdata)
            weakref.finalize(
                alias, lambda key, _: self._aliases.discard(key), alias._cdata, storage
            )

    def watch_weak_references(self, patches: Patches) -> None:
        """Record the weak references that the code for offloading activations makes."""
        weak = self._weak

        class Recorded(StorageWeakRef):
            def __init__(self, storage: Any) -> None:
                super().__init__(storage)
                weak[storage._cdata] = self

        patches.replace(activation, "StorageWeakRef", Recorded)

    def forget_expired(self) -> None:
        """Stop counting storages that only weak references keep."""
        for key, reference in list(self._weak.items()):
            if reference.expired():
                del self._weak[key]
                if key in self._held:
                    self._change(key, self._held.pop(key)[1], 0)

    def resized(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._held:
            if self._held[key][1] == 0:  # FSDP2 gathers parameters into the storage
                self.set_kind(key, TensorKind.GATHERED_WEIGHTS)
            self.see_storage(storage)

    # Sizes, kinds and peaks

    def _size(self, storage: torch.UntypedStorage) -> int:
        return rounded(storage.nbytes()) if self.on_gpu else storage.nbytes()

    def _change(self, key: int, before: int, after: int) -> None:
        if self._weak and after > before and not self._is_in_host(key):
            self.forget_expired()
        phase = self.phase
        if key not in self._kinds:
            new = _NEW_KIND.get(phase, TensorKind.TEMPORARY)
            self._kinds[key] = None if self._new_in_host else new
        kind = self._kinds[key]
        if key not in self._held:
            del self._kinds[key]
        if kind is None:
            self.host_live += after - before
            self.record.host_peak = max(self.record.host_peak, self.host_live)
            return
        self._kind_bytes[kind] += after - before
        if self.on_gpu:
            freed = self.allocator.free(key)
            allocated = self.allocator.allocate(key, after, self.stream)
            if self.history is not None:
                self.history.change(freed, allocated, self.stream, kind.value)
        super()._change(key, before, after)
        if self.keeps_timeline:
            self.record.timeline.append(self.live)
        memory = self.record.phases.setdefault(phase, PhaseMemory())
        if self.live > memory.peak:
            memory.peak, memory.kinds = self.live, dict(self._kind_bytes)

    def _is_in_host(self, key: int) -> bool:
        return self._kinds[key] is None if key in self._kinds else self._new_in_host

    def bytes_of(self, tensor: Tensor) -> int:
        """Return the bytes of a tensor's memory on the device."""
        return self._held.get(tensor.untyped_storage()._cdata, (None, 0))[1]

    def set_kind(
        self, key: int, kind: TensorKind, replaces: Collection[TensorKind] = tuple(TensorKind)
    ) -> None:
        """Set the kind of the storage at an address on the device if its present kind is one of `replaces`."""
        before = self._kinds.get(key)
        if before is not None and before in replaces:
            size = self._held[key][1]
            self._kind_bytes[before] -= size
            self._kind_bytes[kind] += size
            self._kinds[key] = kind

    def device_of(self, storage: Any, reported: torch.device) -> torch.device:
        """Return the device of a storage. PyTorch reports `meta` for one without numbers."""
        key = storage._cdata
        if reported.type != "meta" or key not in self._held:
            return reported
        return torch.device("cpu") if self._is_in_host(key) else self.device
