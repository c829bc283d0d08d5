"""Sets of times as sorted, disjoint intervals: their union, difference and length."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[int, int]
"""The beginning and the end, in any unit."""
Intervals = list[Interval]


def united(times: Iterable[Interval]) -> Intervals:
    """Return the union of intervals, which may overlap and come in any order."""
    union: Intervals = []
    for start, end in sorted(times):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        elif end > start:
            union.append((start, end))
    return union


def without(times: Intervals, others: Intervals) -> Intervals:
    """Return the difference of two sets: `times` minus `others`."""
    difference: Intervals = []
    remaining = iter(others)
    other = next(remaining, None)
    for start, end in times:
        while other is not None and other[1] <= start:
            other = next(remaining, None)
        while other is not None and other[0] < end:
            if other[0] > start:
                difference.append((start, other[0]))
            start = other[1]
            if start >= end:
                break  # it may reach into the next one
            other = next(remaining, None)
        if start < end:
            difference.append((start, end))
    return difference


def within(times: Intervals, others: Intervals) -> Intervals:
    """Return the intersection of two sets."""
    return without(times, without(times, others))


def length(times: Intervals) -> int:
    """Return the total length."""
    return sum(end - start for start, end in times)
