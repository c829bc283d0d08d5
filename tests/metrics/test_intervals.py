from __future__ import annotations

import random
from itertools import pairwise

from nanoscale.metrics.trace import Intervals, length, united, within, without

END = 40


def as_set(times: Intervals) -> set[int]:
    return {moment for start, end in times for moment in range(start, end)}


def test_they_are_sets_of_moments() -> None:
    """Beside Python's sets of whole moments, on many random intervals."""
    dice = random.Random(0)

    def some() -> Intervals:
        ends = [
            sorted((dice.randrange(END), dice.randrange(END))) for _ in range(dice.randrange(6))
        ]
        return [(a, b) for a, b in ends]

    for _ in range(500):
        one, two = some(), some()
        a, b = united(one), united(two)
        assert as_set(a) == as_set(one) and length(a) == len(as_set(one))
        assert all(x[1] < y[0] for x, y in pairwise(a))
        assert as_set(without(a, b)) == as_set(a) - as_set(b)
        assert as_set(within(a, b)) == as_set(a) & as_set(b)
