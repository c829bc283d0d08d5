"""PyTorch's memory, counted as torch.cuda counts it on a GPU: bytes of all storages that are held."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from nanoscale.parallel import ring

PLAIN = (Tensor, torch.nn.Parameter, FakeTensor)
"""Types of tensors on which operations run as they are; other types call operations on these."""
_resize = torch.UntypedStorage.resize_
OPENED: dict[Any, Any] = {
    operation._opoverload: operation._init_fn for operation in (ring._forward, ring._backward)
}
"""The Python code of operations that communicate within themselves, by operation. Their own operations are seen
too; checkpointing of activations, which stands outside, still sees one."""


class LiveMemory(TorchDispatchMode):
    """While it is entered, `live` and `peak` follow every storage that an operation makes, fills or resizes.

    What an operation needs only within itself is not seen, nor what gloo holds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._held: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def __enter__(self) -> LiveMemory:
        torch.UntypedStorage.resize_ = _resizing(self)  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *about: Any) -> None:
        torch.UntypedStorage.resize_ = _resize  # type: ignore[method-assign]
        super().__exit__(*about)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for kind in types:
            if kind not in PLAIN:
                return NotImplemented  # it calls operations on plain tensors, which come back here
        if func in OPENED:
            return self.open(func, args)
        result = func(*args, **(kwargs or {}))
        if not (func.is_view and _is_alias(result, args[0])):  # else it is known, or gloo's own
            tree_map_only(Tensor, self._see, result)
        return result

    def open(self, operation: Any, args: Any) -> Any:
        """Run the operations of one of OPENED one by one, which come back here."""
        TorchDispatchMode.__enter__(self)
        try:
            return OPENED[operation](*args)
        finally:
            TorchDispatchMode.__exit__(self, None, None, None)

    def reset_peak(self) -> None:
        self.peak = self.live

    def resized(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type != "meta":
            self.see_storage(storage)

    def see_storage(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, self._size(storage)
        known = self._held.get(key)
        if known is not None and known[0]() is storage:
            if size != known[1]:
                self._held[key] = known[0], size
                self._change(key, known[1], size)
            return
        if known is not None:  # the same address, and its former owner has gone
            self._change(key, known[1], 0)
        self._held[key] = weakref.ref(storage, partial(self._drop, key)), size
        self._change(key, 0, size)

    def _size(self, storage: torch.UntypedStorage) -> int:
        return storage.nbytes()

    def _see(self, tensor: Tensor) -> None:
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        if isinstance(tensor, AsyncCollectiveTensor):
            tensor = tensor.elem
        if type(tensor) in (Tensor, torch.nn.Parameter) and tensor.device.type != "meta":
            self.see_storage(tensor.untyped_storage())

    def _drop(self, key: int, reference: Any) -> None:
        known = self._held.get(key)
        if known is not None and known[0] is reference:
            del self._held[key]
            self._change(key, known[1], 0)

    def _change(self, key: int, before: int, after: int) -> None:
        """Count a storage, by its key, that had `before` bytes and has `after` now."""
        self.live += after - before
        self.peak = max(self.peak, self.live)


def _is_alias(result: Any, source: Tensor) -> bool:
    """True if the result of an operation that may return a view is one."""
    first = result[0] if isinstance(result, (list, tuple)) else result
    return bool(first.untyped_storage()._cdata == source.untyped_storage()._cdata)


def _resizing(memory: LiveMemory) -> Any:
    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        result = _resize(storage, size)
        memory.resized(storage)
        return result

    return resize_
