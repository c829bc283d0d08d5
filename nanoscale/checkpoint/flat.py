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


class FlatShard(Tensor):
    """The elements `start … start + count` of the part `window` of a tensor, in row-major order.

    In other respects it is a tensor of the whole `shape` on which no operation is defined.
    """

    parts: tuple[Tensor, ...]
    """The tensors in memory: the elements themselves, or tensors from which they are computed."""
    join: Callable[..., Tensor] | None
    """A function from `parts` to the elements; None: the only part is the elements."""
    window: Box
    start: int
    count: int

    @staticmethod
    def __new__(
        cls,
        local: Tensor | Sequence[Tensor],
        shape: tuple[int, ...],
        start: int,
        window: Box | None = None,
        join: Callable[..., Tensor] | None = None,
        dtype: torch.dtype | None = None,
    ) -> FlatShard:
        """Create a shard.

        Args:
            local: `[elements]`, which loading fills in place; or the parts of which `join` computes the whole
                window, in `dtype`, each time it is read, and into which nothing can be loaded.
        """
        parts = (local.detach(),) if isinstance(local, Tensor) else tuple(local)
        shard: FlatShard = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=dtype or parts[0].dtype, device=parts[0].device
        )
        shard.parts, shard.join = parts, join
        shard.start, shard.window = start, window or Box.whole(tuple(shape))
        shard.count = parts[0].numel() if join is None else prod(shard.window.sizes)
        return shard

    def with_parts(self, parts: tuple[Tensor, ...]) -> FlatShard:
        """Return the same shard with copies of its parts, on any device."""
        return FlatShard(parts, self.shape, self.start, self.window, self.join, self.dtype)

    @property
    def local(self) -> Tensor:
        """Return the elements, `[count]`."""
        return self.parts[0] if self.join is None else self.join(*self.parts)

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
