"""The difference of two checkpoints of the same training: which tensors, by how much, and who wrote them."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from operator import add

import torch
from torch import Tensor

from nanoscale.checkpoint.metadata import StoredTensor
from nanoscale.checkpoint.reader import Reader
from nanoscale.checkpoint.store import StoredCheckpoint


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that two checkpoints do not hold equally."""

    name: str
    relative: float | None
    """The largest difference, divided by the largest number of the tensor; None if that is not a number."""
    ranks: list[int]
    """The ranks of the first checkpoint that wrote what differs."""


def differing(
    first: StoredCheckpoint, second: StoredCheckpoint, tolerance: float
) -> Iterator[TensorDifference]:
    """Yield the tensors of the first checkpoint that differ in the second, weights first, in the model's order.

    One tensor of each is in memory. Their dtypes may differ. Tensors that only one has are left out.

    Args:
        tolerance: the relative difference that still counts as equal.
    """
    one, two = Reader(first.path), Reader(second.path)
    for name in sorted(one.tensors.keys() & two.tensors.keys(), key=_in_order):
        stored = one.tensors[name]
        recorded = one.read(name, stored.shape).double()
        difference = (recorded - two.read(name, stored.shape).double()).abs()
        relative = float(difference.max() / recorded.abs().max()) if difference.any() else 0.0
        if not relative <= tolerance:  # true of a number that is not finite, too
            known = relative if math.isfinite(relative) else None
            yield TensorDifference(name, known, _writers(stored, difference != 0))


def _in_order(name: str) -> tuple[bool, list[tuple[bool, int, str]]]:
    """Return a key that puts layer 2 before layer 10, and the weights before moments."""
    parts = [
        (part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in name.split(".")
    ]
    return not name.startswith("model."), parts


def _writers(stored: StoredTensor, differs: Tensor) -> list[int]:
    ranks = set()
    for shard in stored.shards:
        region = tuple(map(slice, shard.offsets, map(add, shard.offsets, shard.sizes)))
        match = re.match(r"__(\d+)_", shard.file)
        if match and bool(torch.any(differs[region])):
            ranks.add(int(match[1]))
    return sorted(ranks)
