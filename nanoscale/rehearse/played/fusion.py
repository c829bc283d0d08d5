"""The memory and traffic of element-wise operations that torch.compile saves in a block, by one rule.

A compiled block is played operation by operation. In the first step it is seen which tensors of element-wise
operations and reductions live how long. From the second step on,
- a tensor that is made and freed between two other operations (products, attention, collectives, copies,
  events) is fused away: it takes no memory, and is neither written nor read;
- a tensor that an element-wise operation makes in the forward pass and no other operation reads in the backward
  pass is computed again there: it is not kept. What it is computed from is kept in its place: the results of
  products and reductions that the forward pass would free;
- a result that autograd keeps and that no operation reads in the backward pass is not kept;
- element-wise operations between two other operations are one kernel, which reads and writes what is left once.

The partitioner of AOTAutograd decides so too: it keeps results of reductions, products and attention, and what
a product reads in the backward pass (torch/_functorch/partitioners.py). It keeps only what its backward graph
reads, even of results that activation checkpointing must save.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
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
Key = tuple[Region, int]
"""A tensor: its region, and its number in the region's pass."""


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
        self._fates: dict[Key, str] = {}
        """The fate of each tensor: `fused`, `dropped` or `kept`."""
        self._read: set[Key] = set()
        """The tensors that a backward pass needs: what only unread results are computed from is not in it."""
        self._alive: set[Key] = set()
        """The tensors that live at the end of their forward pass."""
        self._parents: dict[Key, set[Key]] = {}
        """For each result of an element-wise operation: what it is computed from."""
        self._needs: dict[Key, set[Key]] = {}
        """For each dropped tensor: what is kept in its place."""
        self._needed: set[Key] = set()
        """All tensors that are kept in place of others."""
        self._sources: dict[Key, torch.UntypedStorage] = {}
        """The needed tensors of the present forward pass."""
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
        self._mark_read(it.key for it in [*self._born.values()] if it.key[0] == self.region)
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
        if func.is_view or name == "_unsafe_view":
            return True
        is_reduction = name in _REDUCTIONS
        is_fused = is_reduction or name in _ELEMENTWISE or torch.Tag.pointwise in func.tags
        inputs = {tensor.untyped_storage() for tensor in tensors}
        if not is_fused and name not in EMPTY:
            self.end_segment()
        self._see_storages(inputs, result, drops=is_fused and not is_reduction, fuses=is_fused)
        if is_fused:
            for tensor in tensors:
                self._count(tensor, written=False)
            for tensor in flat(result):
                if isinstance(tensor, Tensor):
                    self._count(tensor, written=True)
        return is_fused or name in EMPTY

    def see_collective(self, tensors: Sequence[Tensor], result: Any) -> None:
        """See a collective of a region, which ends a kernel."""
        if self.region is not None:
            inputs = {tensor.untyped_storage() for tensor in tensors}
            self._see_storages(inputs, result, drops=False, fuses=False)

    def _see_storages(
        self, inputs: Collection[torch.UntypedStorage], result: Any, *, drops: bool, fuses: bool
    ) -> None:
        """See what an operation reads, and what it makes."""
        assert self.region is not None
        parents = {born.key for storage in inputs if (born := self._find(storage)) is not None}
        if self.region[1] == "backward" and not fuses:
            self._fates |= dict.fromkeys(parents, "kept")
        known = {storage._cdata for storage in inputs}
        results = [it.untyped_storage() for it in flat(result) if isinstance(it, Tensor)]
        for storage in results:
            if storage._cdata not in known:
                self._bear(storage, drops=drops, fuses=fuses)
                if drops and not self.learned:
                    self._parents[self.region, self._number] = parents
        if not drops or any(storage._cdata in known for storage in results):
            self._mark_read(parents)

    def _mark_read(self, keys: Iterable[Key]) -> None:
        """Note that a backward pass needs tensors, and what it has computed them from."""
        if self.region is None or self.region[1] != "backward" or self.learned:
            return
        for key in keys:
            if key not in self._read:
                self._read.add(key)
                if key[0] == self.region:
                    self._mark_read(self._parents.get(key, ()))

    def _find(self, storage: torch.UntypedStorage) -> _Born | None:
        """Return what is known of a storage that a region has made."""
        born = self._born.get(storage._cdata)
        return born if born is not None and born.reference() is storage else None

    def _bear(self, storage: torch.UntypedStorage, *, drops: bool, fuses: bool) -> None:
        assert self.region is not None
        self._number += 1
        key = self.region, self._number
        if (self.learned and self._fates.get(key) == "fused") or self.region[1] == "update":
            self._ghosts[storage._cdata] = weakref.ref(storage)
            return
        reference = weakref.ref(storage, partial(self._died, storage._cdata))
        self._born[storage._cdata] = _Born(reference, key, self._segment, drops, fuses)
        if key in self._needed:
            self._sources[key] = storage

    def _died(self, address: int, reference: Any) -> None:
        born = self._born.get(address)
        if born is None or born.reference is not reference:
            return
        del self._born[address]
        if self.learned:
            return
        if born.key in self._alive and born.key not in self._read:
            self._fates[born.key] = "dropped"
        elif born.fuses:
            fate = "fused" if born.segment == self._segment else "kept"
            self._fates.setdefault(born.key, fate)

    def _end_forward(self, region: Region, result: Tensor) -> None:
        """Drop what is computed again in the backward pass: what only fused operations read there."""
        output = result.untyped_storage()
        for address, born in list(self._born.items()):
            storage = born.reference()
            if born.key[0] != region or storage is None:
                continue
            self._alive.add(born.key)
            if storage is output or not (born.drops or self.learned):
                self._fates[born.key] = "kept"
            elif not self.learned:
                self._fates.setdefault(born.key, "dropped")
            elif self._fates.get(born.key) == "dropped" and born.key not in self._needed:
                self._ghosts[address] = weakref.ref(storage)
                self._forget(storage)
                needs = self._needs.get(born.key, set())
                sources = [self._sources[key] for key in needs if key in self._sources]
                self._born[address] = born._replace(sources=sources)
        self._sources.clear()
        self.begin(None)

    def learn(self) -> None:
        """End the first step: decide which tensors are kept in place of dropped ones."""
        self.learned = True
        for key in self._alive:
            if self._fates.get(key) == "dropped" and key in self._read:
                self._needs[key] = set(self._kept_in_place_of(key))
                self._needed |= self._needs[key]

    def _kept_in_place_of(self, key: Key) -> Iterator[Key]:
        for parent in self._parents.get(key, ()):
            if parent in self._alive and self._fates.get(parent) == "kept":
                continue
            if parent in self._parents:
                yield from self._kept_in_place_of(parent)
            else:
                yield parent

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
    key: Key
    segment: int
    drops: bool
    """True if it can be computed again in the backward pass."""
    fuses: bool
    """True if an operation made it that can be fused."""
    sources: Sequence[torch.UntypedStorage] = ()
    """The storages that are kept in its place as long as it lives."""


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
