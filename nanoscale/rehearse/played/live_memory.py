"""The memory of a device, counted as torch.cuda counts it: the bytes of all storages that tensors hold."""

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

from nanoscale.models import moe, narrow_experts
from nanoscale.parallel import expert, ring

PLAIN = (Tensor, torch.nn.Parameter, FakeTensor)
"""Types of tensors on which operations run directly. Other types call operations on tensors of these types."""
_resize = torch.UntypedStorage.resize_
OPENED: dict[Any, Any] = {
    operation._opoverload: operation._init_fn
    for operation in (
        *ring.RING,
        expert.exchange_counts,
        moe.multiply_router,
        moe.choose_experts,
        moe.sort_choices,
        moe.multiply_by_expert,
        moe.gradient_by_expert,
        narrow_experts.multiply_narrow,
        narrow_experts.narrow_gradients,
    )
}
"""The Python code of nanoscale's own operations, by operation.

The operations that this code calls are counted too. Activation checkpointing still sees a single operation.
"""


class LiveMemory(TorchDispatchMode):
    """A mode in which `live` and `peak` count every storage that an operation makes, fills or resizes.

    Memory that an operation frees before it returns is not counted, nor are gloo's buffers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._held: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        """Each storage and its bytes, by the storage's address."""

    def __enter__(self) -> LiveMemory:
        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = _resize(storage, size)
            self.resized(storage)
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        return super().__enter__()

    def __exit__(self, *about: Any) -> None:
        torch.UntypedStorage.resize_ = _resize  # type: ignore[method-assign]
        super().__exit__(*about)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for kind in types:
            if kind not in PLAIN:
                return NotImplemented  # the type calls operations on plain tensors, which come back here
        if func in OPENED:
            return self.open(func, args)
        result = func(*args, **(kwargs or {}))
        # The storage of a view is already counted, or belongs to gloo.
        if not (func.is_view and _is_alias(result, args[0])):
            tree_map_only(Tensor, self._see, result)
        return result

    def open(self, operation: Any, args: Any) -> Any:
        """Run one of OPENED such that the operations that it calls come to this mode."""
        TorchDispatchMode.__enter__(self)
        try:
            return OPENED[operation](*args)
        finally:
            TorchDispatchMode.__exit__(self, None, None, None)

    def reset_peak(self) -> None:
        self.peak = self.live

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count a storage whose size has changed."""
        if storage.device.type != "meta":
            self.see_storage(storage)

    def see_storage(self, storage: torch.UntypedStorage) -> None:
        """Count a storage with its present size."""
        key, size = storage._cdata, self._size(storage)
        reference, counted = self._held.get(key, (None, 0))
        if reference is not None and reference() is storage:
            if size != counted:
                self._held[key] = reference, size
                self._change(key, counted, size)
            return
        if reference is not None:  # the former storage at this address no longer exists
            self._change(key, counted, 0)
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
        if key in self._held and self._held[key][0] is reference:
            self._change(key, self._held.pop(key)[1], 0)

    def _change(self, key: int, before: int, after: int) -> None:
        """Count a storage that had `before` bytes and now has `after`."""
        self.live += after - before
        self.peak = max(self.peak, self.live)


def _is_alias(result: Any, source: Tensor) -> bool:
    """Return True if the result of an operation that may return a view has the storage of its source."""
    results = result if isinstance(result, (list, tuple)) else [result]
    return all(it.untyped_storage()._cdata == source.untyped_storage()._cdata for it in results[:1])
