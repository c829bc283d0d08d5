"""Sets of times as sorted, disjoint intervals: their union, difference and length."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[int, int]
"""The beginning and the end, in any unit."""
Intervals = list[Interval]


def united(times: Iterable[Interval]) -> Intervals:
    """Return the union of intervals, which may overlap and come in any order."""
    found: Intervals = []
    for start, end in sorted(times):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        elif end > start:
            found.append((start, end))
    return found


def without(times: Intervals, others: Intervals) -> Intervals:
    """Return the difference of two sets: `times` minus `others`."""
    found: Intervals = []
    ahead = iter(others)
    other = next(ahead, None)
    for start, end in times:
        while other is not None and other[1] <= start:
            other = next(ahead, None)
        while other is not None and other[0] < end:
            if other[0] > start:
                found.append((start, other[0]))
            start = other[1]
            if start >= end:
                break  # it may reach into the next one
            other = next(ahead, None)
        if start < end:
            found.append((start, end))
    return found


def within(times: Intervals, others: Intervals) -> Intervals:
    """Return the intersection of two sets."""
    return without(times, without(times, others))


def length(times: Intervals) -> int:
    """Return the total length."""
    return sum(end - start for start, end in times)
