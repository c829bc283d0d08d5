"""Tensors between stages, compared with schedules followed by hand."""

from __future__ import annotations

import pytest

from nanoscale.config.layout import takes
from nanoscale.plan.pipeline.residents import at_peak, by_action
from tests.plan.schedules import SCHEDULES


def test_tensors_between_stages_in_each_pass():
    """Zero bubble, two ranks of a stage each, two micro batches.

    o is an output, g a gradient of an output, and s a gradient that is sent and may be under way.

    | rank 0 | F0 | F1 | I0  | W0  | I1   | W1  | | rank 1 | F0 | I0 | F1 | I1 | W0 | W1 |
    |--------|----|----|-----|-----|------|-----|-|--------|----|----|----|----|----|----|
    | o      | 0  | 1  | 2   | 2   | 1    | 1   | | s      | 0  | 0  | 1  | 1  | 2  | 2  |
    | g      | 0  | 0  | 1   | 1   | 1    | 1   | | early  | 0  | 1  | 0  | 0  | 0  | 0  |
    """
    first, last = by_action("zero-bubble", 2, 1, 2)
    assert [tensors for _, tensors in first] == [0, 1, 3, 3, 2, 2]
    assert [tensors for _, tensors in last] == [0, 1, 1, 1, 2, 2]


@pytest.mark.parametrize(("schedule", "virtual"), SCHEDULES)
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_none_is_left_and_more_micro_batches_need_no_more(schedule, virtual, pp):
    few, many = (next(m for m in range(n * pp, 99) if takes(schedule, pp, m)) for n in (2, 4))
    assert at_peak(schedule, pp, virtual, few) == at_peak(schedule, pp, virtual, many)
    most = [max(count for _, count in by_action(schedule, pp, virtual, m)[0]) for m in (few, many)]
    assert most[1] - most[0] <= 1 or schedule in ("gpipe", "looped-bfs")
    assert at_peak(schedule, 1, virtual, few) == (0,)
