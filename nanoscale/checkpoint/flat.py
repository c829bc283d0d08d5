"""A range of a parameter's elements as a shard that torch.distributed.checkpoint can write and read.

ZeRO cuts flattened parameters at the ends of ranks' shards. Checkpoints support only boxes: a range of a
row-major tensor consists of a few of them, at most 2 · dimensions − 1, each contiguous in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from operator import add
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


@dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def whole(shape: tuple[int, ...]) -> Box:
        return Box((0,) * len(shape), shape)


def _unchanged(elements: Tensor) -> Tensor:
    return elements


class FlatShard(Tensor):
    """The elements `start … start + count` of the part `window` of a tensor, in row-major order.

    In other respects it is a tensor of the whole `shape` on which no operation is defined.
    """

    parts: tuple[Tensor, ...]
    """The tensors in memory: the elements themselves, or tensors from which they are computed."""
    join: Callable[..., Tensor]
    """A function from `parts` to the elements."""
    window: Box
    start: int
    count: int

    @staticmethod
    def __new__(
        cls, local: Tensor, shape: tuple[int, ...], start: int, window: Box | None = None
    ) -> FlatShard:
        """Create a shard of `local`, `[elements]`, which loading fills in place."""
        window = window or Box.whole(tuple(shape))
        local = local.detach()
        size = torch.Size(shape)
        return cls._make((local,), _unchanged, local, size, start, local.numel(), window)

    @classmethod
    def computed(
        cls,
        parts: Sequence[Tensor],
        join: Callable[..., Tensor],
        dtype: torch.dtype,
        shape: tuple[int, ...],
        window: Box,
    ) -> FlatShard:
        """Return a shard of the whole `window` that is computed from `parts` each time it is read.

        Nothing can be loaded into it.
        """
        like = torch.empty(0, dtype=dtype, device=parts[0].device)
        count = prod(window.sizes)
        return cls._make(tuple(parts), join, like, torch.Size(shape), 0, count, window)

    @classmethod
    def _make(
        cls,
        parts: tuple[Tensor, ...],
        join: Callable[..., Tensor],
        like: Tensor,
        shape: torch.Size,
        start: int,
        count: int,
        window: Box,
    ) -> FlatShard:
        shard: FlatShard = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=like.dtype, device=like.device
        )
        shard.parts, shard.join = parts, join
        shard.start, shard.count, shard.window = start, count, window
        return shard

    def with_parts(self, parts: tuple[Tensor, ...]) -> FlatShard:
        """Return the same shard with copies of its parts, on any device."""
        like = torch.empty(0, dtype=self.dtype, device=parts[0].device)
        return self._make(parts, self.join, like, self.shape, self.start, self.count, self.window)

    @property
    def local(self) -> Tensor:
        """Return the elements, `[count]`."""
        return self.join(*self.parts)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"FlatShard({tuple(self.shape)}, {self.start}, {self.count})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"a shard of a checkpoint does not support {func}")

    def boxes(self) -> list[tuple[Box, Tensor]]:
        """Return the boxes in the whole tensor, and this shard's memory of each."""
        local = self.local
        return [
            (box, local[start : start + prod(box.sizes)].view(box.sizes))
            for box, start in self.boxes_with_starts()
        ]

    def boxes_with_starts(self) -> list[tuple[Box, int]]:
        """Return the boxes in the whole tensor, and the start of each in this shard's elements."""
        boxes = []
        count = 0
        for box in range_boxes(self.window.sizes, self.start, self.start + self.count):
            offsets = tuple(map(add, box.offsets, self.window.offsets))
            boxes.append((Box(offsets, box.sizes), count))
            count += prod(box.sizes)
        return boxes

    # torch.distributed.checkpoint calls these methods of a tensor subclass:

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(box.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(_chunk(box), properties, self.size()),
            )
            for box, _ in self.boxes_with_starts()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(box) for box, _ in self.boxes_with_starts()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        offsets = tuple(index.offset or ())
        return next(memory for box, memory in self.boxes() if box.offsets == offsets)


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


def range_boxes(shape: tuple[int, ...], start: int, end: int) -> Iterator[Box]:
    """Yield the elements `start … end` of a row-major tensor as boxes, in their order in memory."""
    if start >= end:
        return
    if len(shape) <= 1:
        yield Box((start,) * len(shape), (end - start,) * len(shape))
        return
    row = prod(shape[1:])
    first, last = -(-start // row), end // row
    if first > last:  # within one row
        yield from _boxes_of_row(shape, last, start - last * row, end - last * row)
        return
    if start < first * row:
        yield from _boxes_of_row(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    if last * row < end:
        yield from _boxes_of_row(shape, last, 0, end - last * row)


def _boxes_of_row(shape: tuple[int, ...], index: int, start: int, end: int) -> Iterator[Box]:
    for box in range_boxes(shape[1:], start, end):
        yield Box((index, *box.offsets), (1, *box.sizes))
