"""A reader of checkpoints in memory, for any layout that wrote them and any that continues from them."""

import mmap
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Size, Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from nanoscale.checkpoint.flat import Box
from nanoscale.checkpoint.memory_writer import boxes_of
from nanoscale.checkpoint.staging import State
from nanoscale.common.errors import LostPeerError
from nanoscale.processes.peer_files import COMMITTED, PeerFiles
from nanoscale.runs.memory_order import (
    MemoryOrder,
    MemorySource,
    read_index,
    read_regular,
    require_regular,
)


class _File:
    """A rank's file on this host, or on another one."""

    def __init__(self, folder: Path | PeerFiles, name: str) -> None:
        self._folder, self._name = folder, name
        self._mapped: mmap.mmap | None = None

    def read(self, start: int, dtype: torch.dtype, sizes: tuple[int, ...]) -> Tensor:
        """Read a part of a tensor."""
        size = prod(sizes) * dtype.itemsize
        data: Any
        if isinstance(self._folder, PeerFiles):
            data = self._folder.read(self._name, start, size)
        else:
            if self._mapped is None:
                require_regular(self._folder / self._name)
                with (self._folder / self._name).open("rb") as file:
                    # Copy on write: torch refuses memory that it may not write.
                    self._mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            data = memoryview(self._mapped)[start : start + size]
        if len(data) < size:
            raise LostPeerError(f"a peer was lost: {self._name} in memory is too short")
        return torch.frombuffer(data, dtype=dtype, count=prod(sizes)).view(sizes)


class _Reader:
    """A reader of the tensors of several ranks' files."""

    def __init__(self) -> None:
        self._tensors: dict[str, dict[str, Any]] = {}
        self._chunks: dict[str, dict[Box, Callable[[], Tensor]]] = {}
        """The functions that read the parts of each tensor."""

    def add(self, folder: Path | PeerFiles, committed: dict[str, Any]) -> dict[str, Any]:
        """Add the tensors of a rank's file, unless they are known; return the manifest of its checkpoint."""
        file = _File(folder, committed["file"])
        for name, about in committed["tensors"].items():
            self._tensors.setdefault(name, about)
            dtype, start = getattr(torch, about["dtype"]), about["start"]
            for offsets, sizes in about["boxes"]:
                box = Box(tuple(offsets), tuple(sizes))
                read = partial(file.read, start, dtype, box.sizes)
                self._chunks.setdefault(name, {}).setdefault(box, read)
                start += prod(sizes) * dtype.itemsize
        return committed["manifest"]

    def has_all(self, state: State) -> bool:
        """True if the files have each element of this rank's tensors, and none in two different parts."""
        return all(
            _covers(self._chunks.get(name, ()), box)
            for name, value in state.items()
            for box in boxes_of(value)
        )

    def fill(self, state: State) -> None:
        """Fill this rank's tensors in place, by torch's plan of what to read for them."""
        planner = DefaultLoadPlanner()
        planner.set_up_planner(state, metadata=self._metadata(state))
        for item in planner.finish_plan(planner.create_local_plan()).items:
            index = item.storage_index
            assert index.index is not None, "the plan was made from these chunks"
            value = [*self._chunks[index.fqn].values()][index.index]()
            for dimension, start in enumerate(item.storage_offsets):
                value = value.narrow(dimension, start, item.lengths[dimension])
            target = planner.resolve_tensor(item).detach()
            target.copy_(value)
            planner.commit_tensor(item, target)

    def _metadata(self, state: State) -> Metadata:
        entries: dict[str, STORAGE_TYPES] = {}
        for name in state:
            about, boxes = self._tensors[name], self._chunks[name]
            properties = TensorProperties(dtype=getattr(torch, about["dtype"]))
            chunks = [ChunkStorageMetadata(Size(box.offsets), Size(box.sizes)) for box in boxes]
            entries[name] = TensorStorageMetadata(properties, Size(about["shape"]), chunks)
        return Metadata(entries)


def load(order: MemoryOrder, source: MemorySource, state: State) -> dict[str, Any]:
    """Fill `state` in place from a checkpoint in memory; return its manifest.

    Files of other hosts are read only where this host has not all that this rank needs.

    Raises:
        LostPeerError: a part of it is missing.
        OSError: a host that holds a part of it does not answer.
    """
    reader = _Reader()
    folders = [Path(it) for it in (order.folder, source.folder) if it is not None]
    manifests = [reader.add(it, about) for it in folders for about in _committed(it, source)]
    if not manifests or not reader.has_all(state):
        for peer in filter(lambda it: it.port, source.peers):
            files = PeerFiles(peer.address, peer.port, bytes.fromhex(order.key))
            manifests += [reader.add(files, it) for it in _committed(files, source)]
    if not manifests or not reader.has_all(state):
        raise LostPeerError(f"a peer was lost: the memory of step {source.step} is not complete")
    reader.fill(state)
    return manifests[0]


def _committed(folder: Path | PeerFiles, source: MemorySource) -> Iterator[dict[str, Any]]:
    """Yield what is known of each rank's file of a checkpoint, in a folder here or on another host."""
    pattern = f"{source.attempt}-*{COMMITTED}"
    if isinstance(folder, PeerFiles):
        indexes = [bytes(folder.read(name)) for name in folder.names(pattern)]
    else:
        indexes = [read_regular(path) for path in sorted(folder.glob(pattern)) if path.is_file()]
    for index in indexes:
        with suppress(ValueError):  # the launcher has chosen a state without this damaged file
            committed = read_index(index)
            if committed["count"] == source.count:
                yield committed


def _covers(chunks: Iterable[Box], box: Box) -> bool:
    """True if parts of a tensor cover each element of a box exactly once."""
    parts = sorted((it for it in chunks if _common(it, box)), key=lambda it: it.offsets)
    for number, part in enumerate(parts):
        for other in islice(parts, number + 1, None):
            if other.offsets[0] >= part.offsets[0] + part.sizes[0]:
                break  # the later ones begin there or behind it
            if _common(part, other):
                return False
    return sum(_common(it, box) for it in parts) == prod(box.sizes)


def _common(box: Box, other: Box) -> int:
    """Return the number of elements that two parts of a tensor share."""
    both = zip(box.offsets, box.sizes, other.offsets, other.sizes, strict=True)
    return prod(max(0, min(a + m, b + n) - max(a, b)) for a, m, b, n in both)
