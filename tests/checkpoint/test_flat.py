from __future__ import annotations

import random
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from nanoscale.checkpoint.flat import Box, FlatShard, range_boxes


def test_boxes_are_the_range_in_the_order_of_memory() -> None:
    draw = random.Random(0)
    for _ in range(2000):
        shape = tuple(draw.randint(1, 4) for _ in range(draw.randint(0, 4)))
        whole = torch.arange(prod(shape)).view(shape)
        start = draw.randint(0, whole.numel())
        end = draw.randint(start, whole.numel())
        boxes = list(range_boxes(shape, start, end))
        elements = [value for box in boxes for value in part(whole, box).flatten().tolist()]
        assert elements == list(range(start, end))
        assert len(boxes) <= max(1, 2 * len(shape) - 1)


def part(whole: torch.Tensor, box: Box) -> torch.Tensor:
    for dimension, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        whole = whole.narrow(dimension, offset, size)
    return whole


@pytest.mark.parametrize("shape", [(7,), (5, 3), (2, 3, 4)])
def test_a_checkpoint_gives_ranges_of_what_it_holds_whole(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    whole = torch.randn(shape)
    dcp.save({"x": whole}, checkpoint_id=tmp_path, no_dist=True)
    for start, end in ((0, whole.numel()), (1, 4), (3, whole.numel()), (2, 2)):
        local = torch.zeros(end - start)
        dcp.load({"x": FlatShard(local, shape, start)}, checkpoint_id=tmp_path, no_dist=True)
        assert torch.equal(local, whole.flatten()[start:end])


def test_a_checkpoint_is_whole_where_ranges_make_it_so(tmp_path: Path) -> None:
    whole = torch.randn(5, 3)
    shard = FlatShard(whole.flatten(), (5, 3), 0)
    dcp.save({"x": shard}, checkpoint_id=tmp_path, no_dist=True)
    read = torch.zeros(5, 3)
    dcp.load({"x": read}, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(read, whole)


def test_a_range_within_a_window(tmp_path: Path) -> None:
    """The window is from a matrix that tensor parallelism has divided by column."""
    whole = torch.arange(24.0).view(4, 6)
    dcp.save({"x": whole}, checkpoint_id=tmp_path, no_dist=True)
    local = torch.zeros(5)
    shard = FlatShard(local, (4, 6), 2, Box((0, 3), (4, 3)))
    dcp.load({"x": shard}, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(local, whole[:, 3:].flatten()[2:7])
