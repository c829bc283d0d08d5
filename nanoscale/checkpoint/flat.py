"""A range of a parameter's elements as a shard that torch.distributed.checkpoint can write and read.

ZeRO cuts flattened parameters wherever a rank's share ends. Checkpoints know boxes only: a range of a
row-major tensor is a few of them, at most 2 · dimensions − 1, and each lies in one piece in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
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
    """Elements `start … start + local.numel()` of the part `window` of a tensor, in row-major order.

    To everyone else it is a tensor of the whole `shape` on which no operation is defined.
    """

    local: Tensor
    window: Box
    start: int

    @staticmethod
    def __new__(
        cls, local: Tensor, shape: tuple[int, ...], start: int, window: Box | None = None
    ) -> FlatShard:
        """`local`: `[elements]`, which loading fills in place."""
        shard: FlatShard = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=local.dtype, device=local.device
        )
        shard.local = local.detach()
        shard.window = window or Box.whole(tuple(shape))
        shard.start = start
        return shard

    def __repr__(self) -> str:  # type: ignore[override]
        return f"FlatShard({tuple(self.shape)}, {self.start}, {self.local.numel()})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"a shard of a checkpoint takes no part in {func}")

    def boxes(self) -> list[tuple[Box, Tensor]]:
        """The boxes in the whole tensor, and this shard's memory of each."""
        parts = []
        done = 0
        for box in cut(self.window.sizes, self.start, self.start + self.local.numel()):
            numel = prod(box.sizes)
            offsets = tuple(a + b for a, b in zip(box.offsets, self.window.offsets, strict=True))
            memory = self.local[done : done + numel].view(box.sizes)
            parts.append((Box(offsets, box.sizes), memory))
            done += numel
        return parts

    # What torch.distributed.checkpoint asks of a tensor that it does not know:

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(box.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(_chunk(box), properties, self.size()),
            )
            for box, _ in self.boxes()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(box) for box, _ in self.boxes()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(
            memory for box, memory in self.boxes() if box.offsets == tuple(index.offset or ())
        )


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


def cut(shape: tuple[int, ...], start: int, end: int) -> Iterator[Box]:
    """The elements `start … end` of a row-major tensor as boxes, in the order in which they lie in memory."""
    if start >= end:
        return
    if len(shape) <= 1:
        yield Box((start,) * len(shape), (end - start,) * len(shape))
        return
    row = prod(shape[1:])
    first, last = -(-start // row), end // row
    if first > last:  # within one row
        yield from _within(shape, last, start - last * row, end - last * row)
        return
    if start < first * row:
        yield from _within(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    if last * row < end:
        yield from _within(shape, last, 0, end - last * row)


def _within(shape: tuple[int, ...], index: int, start: int, end: int) -> Iterator[Box]:
    for box in cut(shape[1:], start, end):
        yield Box((index, *box.offsets), (1, *box.sizes))
