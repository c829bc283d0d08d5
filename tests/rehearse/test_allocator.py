"""The caching allocator's segments, by the rules of PyTorch's own documentation of it."""

from __future__ import annotations

import pytest

from nanoscale.rehearse.played.allocator import Allocator, rounded

MIB = 1 << 20


def test_sizes_are_rounded_up() -> None:
    assert [rounded(size) for size in (0, 1, 512, 513)] == [0, 512, 512, 1024]


@pytest.mark.parametrize(
    ("sizes", "reserved"),
    [
        ([512], 2 * MIB),
        ([MIB, MIB], 2 * MIB),
        ([MIB] * 3, 4 * MIB),
        ([MIB + 512], 20 * MIB),
        ([9 * MIB, 9 * MIB], 20 * MIB),
        ([9 * MIB] * 3, 40 * MIB),
        ([10 * MIB], 10 * MIB),
        ([11 * MIB + 512], 12 * MIB),
    ],
)
def test_segments(sizes: list[int], reserved: int) -> None:
    allocator = Allocator()
    for key, size in enumerate(sizes):
        allocator.allocate(key, size, 0)
    assert allocator.reserved == reserved


def test_freed_neighbors_are_one_block_again() -> None:
    allocator = Allocator()
    for key in range(2):
        allocator.allocate(key, 9 * MIB, 0)
    for key in range(2):
        allocator.free(key)
    assert allocator.allocate(2, 18 * MIB, 0) == 0
    assert allocator.reserved == 20 * MIB


def test_streams_do_not_share() -> None:
    allocator = Allocator()
    allocator.allocate(0, 10 * MIB, 0)
    allocator.free(0)
    allocator.allocate(1, 10 * MIB, 1)
    assert allocator.reserved == 20 * MIB


def test_the_smallest_block_that_suffices_is_taken() -> None:
    allocator = Allocator()
    first = [allocator.allocate(key, size * MIB, 0) for key, size in enumerate((40, 30, 50))]
    for key in range(3):
        allocator.free(key)
    assert allocator.allocate(3, 30 * MIB, 0) == first[1]
