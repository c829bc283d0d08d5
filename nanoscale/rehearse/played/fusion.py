"""The memory and traffic of element-wise operations that torch.compile saves in a block, by one rule.

A compiled block is played operation by operation. In the first step it is seen which tensors of element-wise
operations and reductions live how long. From the second step on,
- a tensor that is made and freed between two other operations (products, attention, collectives, copies,
  events) is fused away: it takes no memory, and is neither written nor read;
- a tensor that an element-wise operation makes in the forward pass and no other operation reads in the backward
  pass is computed again there: it is not kept;
- element-wise operations between two other operations are one kernel, which reads and writes what is left once.

The partitioner of AOTAutograd decides so too: it keeps results of reductions, products and attention, and what
a product reads in the backward pass (torch/_functorch/partitioners.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanoscale.rehearse.played.work import EMPTY, Work, bytes_of, flat

_ELEMENTWISE = {
    "clone",
    "copy_",
    "_to_copy",
    "cat",
    "fill_",
    "zero_",
    "zeros",
    "zeros_like",
    "full",
    "where",
    "arange",
}
_REDUCTIONS = {
    "sum",
    "mean",
    "amax",
    "max",
    "var",
    "_softmax",
    "_softmax_backward_data",
    "logsumexp",
}
Region = tuple[int, str]


class Fusion:
    """The compiled blocks of a rank, which are played one after the other."""

    def __init__(
        self, end_kernel: Callable[[Work], None], forget: Callable[[torch.UntypedStorage], None]
    ) -> None:
        """Make it of functions that record the work of a kernel, and that stop counting a storage."""
        self.learned = False
        """True from the second step on."""
        self.region: Region | None = None
        """The block whose pass is played, and which pass; None outside of compiled blocks."""
        self._end_kernel, self._forget = end_kernel, forget
        self._fates: dict[tuple[Region, int], str] = {}
        """The fate of each tensor, by its number in its region: `fused`, `dropped` or `kept`."""
        self._number = self._segment = self._bytes = 0
        self._born: dict[int, _Born] = {}
        """The storages that regions made, by their addresses."""
        self._ghosts: dict[int, weakref.ref[Any]] = {}
        """Storages that take no memory, by their addresses."""
        self._counted: set[tuple[int, bool]] = set()
        """The storages that the present kernel has read (False) or written (True)."""

    def compile(
        self, function: Callable[..., Any] | None = None, *, dynamic: bool = False, **_: Any
    ) -> Callable[..., Any]:
        """Take the place of torch.compile for a block's forward pass, or with `dynamic` for an update."""
        if function is None:
            return lambda function: function
        if dynamic:
            return partial(self._update, function)
        forward, backward = (id(function), "forward"), (id(function), "backward")

        def run(hidden: Any, *args: Any, **options: Any) -> Any:
            if not torch.is_grad_enabled():  # an evaluation, or an optimizer's function
                return function(hidden, *args, **options)
            self.begin(forward)
            result = function(_Mark.apply(hidden, lambda: self.begin(None)), *args, **options)
            self._end_forward(forward, result)
            return _Mark.apply(result, lambda: self.begin(backward))

        return run

    def _update(self, function: Callable[..., Any], *args: Any) -> None:
        """Play an update as one kernel, all new tensors of which are fused away."""
        self.begin((id(function), "update"))
        function(*args)
        self.begin(None)

    def begin(self, region: Region | None) -> None:
        """End the present region, and begin another."""
        self.end_segment()
        self.region, self._number = region, 0

    def end_segment(self) -> None:
        """End the present kernel: another operation, or an event, follows."""
        if self._bytes:
            self._end_kernel(("bytes", "fused", self._bytes))
        self._bytes, self._counted = 0, set()
        self._segment += 1

    def is_ghost(self, storage: torch.UntypedStorage) -> bool:
        reference = self._ghosts.get(storage._cdata)
        return reference is not None and reference() is storage

    def see(self, func: Any, tensors: Sequence[Tensor], result: Any) -> bool:
        """See an operation of a region; True if it is a part of a kernel of fused operations."""
        name = func.__name__.partition(".")[0]
        if func.is_view:
            return True
        is_reduction = name in _REDUCTIONS
        is_fused = is_reduction or name in _ELEMENTWISE or torch.Tag.pointwise in func.tags
        inputs = {tensor.untyped_storage() for tensor in tensors}
        if not is_fused and name not in EMPTY:
            self.end_segment()
            self._keep_for_backward(inputs)
        known = {storage._cdata for storage in inputs}
        new = [it.untyped_storage() for it in flat(result) if isinstance(it, Tensor)]
        for storage in new:
            if storage._cdata not in known:
                self._bear(storage, drops=is_fused and not is_reduction, fuses=is_fused)
        if is_fused:
            for tensor in tensors:
                self._count(tensor, written=False)
            for tensor in flat(result):
                if isinstance(tensor, Tensor):
                    self._count(tensor, written=True)
        return is_fused or name in EMPTY

    def _keep_for_backward(self, inputs: Iterable[torch.UntypedStorage]) -> None:
        """Keep what an operation that is not fused reads in a backward pass."""
        assert self.region is not None
        if self.region[1] == "backward":
            for storage in inputs:
                born = self._born.get(storage._cdata)
                if born is not None and born.reference() is storage:
                    self._fates[born.region, born.number] = "kept"

    def _bear(self, storage: torch.UntypedStorage, *, drops: bool, fuses: bool) -> None:
        assert self.region is not None
        self._number += 1
        fate = self._fates.get((self.region, self._number))
        if (self.learned and fate == "fused") or self.region[1] == "update":
            self._ghosts[storage._cdata] = weakref.ref(storage)
            return
        reference = weakref.ref(storage, partial(self._died, storage._cdata) if fuses else None)
        born = _Born(reference, self.region, self._number, self._segment, drops)
        self._born[storage._cdata] = born

    def _died(self, key: int, reference: Any) -> None:
        born = self._born.get(key)
        if born is None or born.reference is not reference:
            return
        del self._born[key]
        if not self.learned:
            fate = "fused" if born.segment == self._segment else "kept"
            self._fates.setdefault((born.region, born.number), fate)

    def _end_forward(self, region: Region, result: Tensor) -> None:
        """Drop what is computed again in the backward pass: what only fused operations read there."""
        output = result.untyped_storage()
        for born in list(self._born.values()):
            storage = born.reference()
            if born.region != region or storage is None:
                continue
            if not born.drops or storage is output:
                self._fates[region, born.number] = "kept"
            elif self.learned and self._fates.get((region, born.number)) == "dropped":
                self._ghosts[storage._cdata] = weakref.ref(storage)
                self._forget(storage)
            else:
                self._fates.setdefault((region, born.number), "dropped")
        self.begin(None)

    def _count(self, tensor: Tensor, *, written: bool) -> None:
        """Add the bytes that the present kernel reads or writes, once for each storage."""
        storage = tensor.untyped_storage()
        born = self._born.get(storage._cdata)
        is_local = born is not None and born.segment == self._segment
        key = storage._cdata, written
        if self.is_ghost(storage) or (is_local and not written) or key in self._counted:
            return
        self._counted.add(key)
        self._bytes += bytes_of(tensor)


class _Born(NamedTuple):
    """A storage that a region has made."""

    reference: weakref.ref[Any]
    region: Region
    number: int
    """Its number in the region's pass."""
    segment: int
    drops: bool
    """True if it can be computed again in the backward pass."""


class _Mark(torch.autograd.Function):
    """The identity, which calls a function in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.call()
        return grad, None
