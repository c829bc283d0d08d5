"""The moments at which a pipeline rank may hold most, against schedules followed by hand."""

from __future__ import annotations

from nanoscale.plan.pipeline.residents import Moment, moments


def test_the_moments_of_a_divided_backward_pass():
    """Zero bubble, two ranks of a stage each, two micro batches: what is in the table, line by line.

    | rank 0     | F0 | F1 | I0 | W0 | I1 | W1 | | rank 1     | F0 | I0 | F1 | I1 | W0 | W1 |
    |------------|----|----|----|----|----|----|-|------------|----|----|----|----|----|----|
    | held       | 1  | 2  | 2  | 2  | 1  | 1  | | held       | 1  | 1  | 2  | 2  | 2  | 1  |
    | I, no W    | 0  | 0  | 0  | 0  | 0  | 0  | | I, no W    | 0  | 0  | 1  | 1  | 1  | 0  |
    | tensors    | 0  | 1  | 3  | 3  | 2  | 2  | | tensors    | 0  | 1  | 1  | 1  | 2  | 2  |
    """
    first, last = (moments("zero-bubble", 2, 1, 2, rank) for rank in (0, 1))
    assert first == (
        Moment((2,), (0,), 1, "F", 0),
        Moment((2,), (0,), 3, "I", 0),
        Moment((2,), (0,), 3, "W", 0),
    )
    assert last == (
        Moment((2,), (1,), 1, "F", 0),
        Moment((2,), (1,), 1, "I", 0),
        Moment((2,), (1,), 2, "W", 0),
    )


def test_a_rank_of_two_stages_counts_each_apart():
    """ZB-V's first rank, stages 0 and 3: F0 F0' | F3 I3 W3 | F3' I3' W3' | I0 W0 | I0' W0', where a dash is the
    second micro batch: while anything goes through stage 3, stage 0 holds both."""
    first = moments("zbv", 2, 2, 2, 0)
    held = {(moment.kind, moment.stage_index): moment.held for moment in first}
    assert held == {
        ("F", 0): (2, 0),
        ("F", 1): (2, 1),
        ("I", 1): (2, 1),
        ("W", 1): (2, 1),
        ("I", 0): (2, 0),
        ("W", 0): (2, 0),
    }


def test_more_micro_batches_than_are_followed_come_in_the_middle():
    """1F1B's last rank holds one, however many there are."""
    kinds = [(moment.held, moment.kind) for moment in moments("1f1b", 2, 1, 6, 1)]
    assert kinds == [((1,), "F"), ((1,), "B")]
