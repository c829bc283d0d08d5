"""Times, waits and peaks of simulated pipelines: textbook numbers, bounds, and dependencies one by one."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest

from nanoscale.config.layout import rank_of
from nanoscale.plan.pipeline.orders import Action, order
from nanoscale.plan.pipeline.residents import residents
from nanoscale.plan.pipeline.simulation import (
    Costs,
    Timeline,
    first_stage_undivided,
    simulate,
    simulate_schedule,
    transfers_overlap,
)
from tests.plan.schedules import SCHEDULES, batches, even_costs, idle


def even(schedule: str, pp: int, virtual: int, micro_batches: int, **costs: float) -> Timeline:
    return simulate(order(schedule, pp, virtual, micro_batches), even_costs(pp * virtual, **costs))


def uneven(stages: int, overlap: bool, chance: random.Random) -> Costs:
    def some(count: int, most: float) -> list[float]:
        return [chance.choice([0.0, 1.0, chance.random() * most]) for _ in range(count)]

    return Costs(some(stages, 2), some(stages, 4), some(stages, 2), some(stages - 1, 1), overlap)


# --- textbook numbers -----------------------------------------------------------------------------


def test_one_micro_batch_uses_an_eighth_of_eight_stages():
    assert even("gpipe", 8, 1, 1).utilization == pytest.approx(0.125)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_four_micro_batches_use_four_sevenths_of_four_stages(schedule):
    """However long a backward pass is against a forward pass."""
    for backward in (0.5, 1.0, 3.0):
        timeline = even(schedule, 4, 1, 4, backward_input=backward)
        assert timeline.utilization == pytest.approx(4 / 7)
        assert timeline.bubble_fraction == pytest.approx(3 / 7)


def test_1f1b_by_hand():
    """Two stages, two micro batches, a backward pass twice as long: the picture that one draws first."""
    first, last = even("1f1b", 2, 1, 2).ranks
    assert [(a.kind, a.micro_batch, start, end) for a, start, end in first] == [
        ("F", 0, 0, 1), ("F", 1, 1, 2), ("B", 0, 4, 6), ("B", 1, 7, 9),
    ]  # fmt: skip
    assert [(a.kind, a.micro_batch, start, end) for a, start, end in last] == [
        ("F", 0, 1, 2), ("B", 0, 2, 4), ("F", 1, 4, 5), ("B", 1, 5, 7),
    ]  # fmt: skip


def test_interleaving_divides_the_bubble():
    """Narayanan et al. 2021, 2.2.2: v stages a rank of a v-th of the blocks each, a v-th of the bubble."""
    whole = idle(even("1f1b", 4, 1, 8))[0]
    for virtual in (2, 3, 4):
        part = 1 / virtual
        costs = {"forward": part, "backward_input": part, "backward_weight": part}
        assert idle(even("interleaved-1f1b", 4, virtual, 8, **costs))[0] == pytest.approx(
            whole / virtual
        )


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_zero_bubble_waits_a_third_of_what_1f1b_does(pp, rounds):
    """Qi et al. 2023, table 1 with equal costs: (pp - 1)(f + i - w) against (pp - 1)(f + i + w)."""
    plain, filled = (idle(even(name, pp, 1, rounds * pp))[0] for name in ("1f1b", "zero-bubble"))
    assert filled == pytest.approx(plain / 3)


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
def test_zbv_only_waits_for_the_v_to_fill(pp):
    """A rank of ZB-V begins late by its number, and never waits between, with equal costs."""
    timeline = even("zbv", pp, 2, 3 * pp)
    for rank, spans in enumerate(timeline.ranks):
        assert spans[0].start == rank
        assert all(before.end == after.start for before, after in pairwise(spans))


# --- held activations -----------------------------------------------------------------------------


def test_1f1b_holds_what_is_between_a_rank_and_the_last_and_gpipe_all():
    for pp in (2, 4, 8):
        for micro_batches in (pp, 3 * pp):
            held = even("1f1b", pp, 1, micro_batches).held
            assert held == [[pp - rank] for rank in range(pp)]
            assert even("gpipe", pp, 1, micro_batches).held == [[micro_batches]] * pp


def test_activations_are_held_until_the_gradients_of_weights_are_done():
    """F0 F1 I0 F2 holds three, the first of which only waits for its weights; counted by hand."""
    actions = [
        Action("F", 0, 0), Action("F", 0, 1), Action("I", 0, 0), Action("F", 0, 2), Action("W", 0, 0),
        Action("I", 0, 1), Action("W", 0, 1), Action("B", 0, 2),
    ]  # fmt: skip
    peak = residents(actions)
    assert (peak.held, peak.awaiting_weights) == ([3], [1])


def test_the_peak_is_that_of_the_rank_not_of_each_stage():
    """F of stage 0 twice, backward once, then stage 1 twice: 3 at once, though each stage once held 2."""
    actions = [
        Action("F", 0, 0), Action("F", 0, 1), Action("B", 0, 0), Action("F", 2, 0), Action("F", 2, 1),
    ]  # fmt: skip
    assert residents(actions).held == [1, 2]
    assert residents(actions, sizes=[5, 1]).held == [2, 0]


def test_of_equal_peaks_the_first_is_taken():
    actions = [Action("F", 0, 0), Action("F", 0, 1), Action("B", 0, 0), Action("F", 2, 0)]
    assert residents(actions).held == [2, 0]


# --- laws, for random costs -----------------------------------------------------------------------

CASES = [
    (schedule, virtual, pp, micro_batches, seed)
    for schedule, virtual in SCHEDULES
    for pp in (2, 3, 5)
    for seed, micro_batches in enumerate(batches(schedule, pp)[-3:])
]


@pytest.mark.parametrize(("schedule", "virtual", "pp", "micro_batches", "seed"), CASES)
def test_dependencies_hold_and_nothing_waits_without_a_reason(
    schedule, virtual, pp, micro_batches, seed
):
    chance = random.Random(seed)
    costs = uneven(pp * virtual, transfers_overlap(schedule), chance)
    timeline = simulate(order(schedule, pp, virtual, micro_batches), costs)
    sent = sending_times(timeline)
    for spans in timeline.ranks:
        free = 0.0
        for action, start, end in spans:
            seconds = duration(action, costs)
            assert end - start == pytest.approx(seconds)
            made, transfer = needs(action, sent, schedule, pp, costs)
            earliest = max(free, made + transfer) if costs.overlap else max(free, made) + transfer
            assert start == pytest.approx(earliest)
            free = end


def duration(action: Action, costs: Costs) -> float:
    stage = action.stage
    whole = costs.backward_input[stage] + costs.backward_weight[stage]
    return {
        "F": costs.forward[stage],
        "I": costs.backward_input[stage],
        "W": costs.backward_weight[stage],
        "B": whole,
    }[action.kind]


def sending_times(timeline: Timeline) -> dict[tuple[str, int, int], float]:
    """When each result leaves its rank: a pair's forward result leaves when the backward pass is done too."""
    sent: dict[tuple[str, int, int], float] = {}
    for spans in timeline.ranks:
        for span, after in zip(spans, [*spans[1:], spans[-1]], strict=True):
            kind = "I" if span.action.kind == "B" else span.action.kind
            sent[kind, *span.action[1:3]] = after.end if span.action.joined else span.end
    return sent


def needs(
    action: Action, sent: dict[tuple[str, int, int], float], schedule: str, pp: int, costs: Costs
) -> tuple[float, float]:
    """When the input was made, and how long its transfer takes."""
    stage, batch = action.stage, action.micro_batch
    if action.kind == "W":
        return sent["I", stage, batch], 0.0
    source = ("F", stage - 1) if action.kind == "F" else ("I", stage + 1)
    if source[1] < 0:
        return 0.0, 0.0
    if source[1] == len(costs.forward):
        return sent["F", stage, batch], 0.0
    same = rank_of(schedule, pp, stage) == rank_of(schedule, pp, source[1])
    return sent[*source, batch], 0.0 if same else costs.transfer[min(stage, source[1])]


@pytest.mark.parametrize(("schedule", "virtual", "pp", "micro_batches", "seed"), CASES)
def test_a_step_is_no_shorter_than_its_longest_path_and_its_busiest_rank(
    schedule, virtual, pp, micro_batches, seed
):
    costs = uneven(pp * virtual, transfers_overlap(schedule), random.Random(seed + 100))
    timeline = simulate(order(schedule, pp, virtual, micro_batches), costs)
    hops = [
        transfer
        for stage, transfer in enumerate(costs.transfer)
        if rank_of(schedule, pp, stage) != rank_of(schedule, pp, stage + 1)
    ]
    path = sum(costs.forward) + sum(costs.backward_input) + 2 * sum(hops)
    assert timeline.makespan >= path - 1e-9
    assert timeline.makespan >= max(timeline.busy) - 1e-9
    each = [
        sum(parts)
        for parts in zip(costs.forward, costs.backward_input, costs.backward_weight, strict=True)
    ]
    assert sum(timeline.busy) == pytest.approx(micro_batches * sum(each))
    assert min(idle(timeline)) >= -1e-9
    assert 0 <= timeline.utilization <= 1 + 1e-9


def test_an_order_that_deadlocks_is_refused():
    """The first rank wants its gradient before it has sent the last one anything."""
    bad = [[Action("F", 0, 0), Action("B", 0, 1), Action("F", 0, 1), Action("B", 0, 0)],
           [Action("F", 1, 0), Action("B", 1, 0), Action("F", 1, 1), Action("B", 1, 1)]]  # fmt: skip
    with pytest.raises(AssertionError, match="deadlock: rank 0 waits"):
        simulate(bad, even_costs(2))


def test_the_first_stage_goes_backward_as_a_whole_when_its_weights_are_asked_for():
    costs = first_stage_undivided(even_costs(4, backward_input=2.0))
    assert costs.backward_input[:2] == [0.0, 2.0] and costs.backward_weight[:2] == [3.0, 1.0]
    timeline = simulate(order("zero-bubble", 4, 1, 8), costs)
    assert timeline.busy == pytest.approx([32.0] * 4)


def test_a_schedule_is_simulated_as_torch_runs_it():
    """1f1b waits for its transfers, and zero-bubble's first stage has nothing to do for its inputs."""
    costs = even_costs(4, backward_input=2.0, transfer=0.25)
    plain = simulate_schedule("1f1b", 4, 1, 8, costs)
    assert (
        plain.makespan == simulate(order("1f1b", 4, 1, 8), replace(costs, overlap=False)).makespan
    )
    assert plain.makespan > simulate(order("1f1b", 4, 1, 8), costs).makespan
    ranks = simulate_schedule("zero-bubble", 4, 1, 8, costs).ranks
    inputs = [{s.end - s.start for s in spans if s.action.kind == "I"} for spans in ranks[:2]]
    assert inputs == [{0.0}, {2.0}]
    assert simulate_schedule("zero-bubble", 1, 1, 8, even_costs(1)).makespan == 24


def test_a_pair_sends_when_both_are_done():
    """dualpipev: the next rank's forward pass waits for the backward pass after the one that feeds it."""
    timeline = even("dualpipev", 4, 2, 12)

    @cache
    def span(kind: str, stage: int, batch: int) -> tuple[float, float]:
        return next(
            (s.start, s.end) for spans in timeline.ranks for s in spans
            if (s.action.kind, s.action.stage, s.action.micro_batch) == (kind, stage, batch)
        )  # fmt: skip

    joined = [(i, s) for i, s in enumerate(timeline.ranks[0]) if s.action.joined]
    for place, pair in joined:
        _, stage, batch, _ = pair.action
        if stage == 0:
            assert span("F", 1, batch)[0] >= timeline.ranks[0][place + 1].end


def test_time_is_linear_in_the_number_of_actions():
    def seconds(micro_batches: int) -> float:
        actions = order("interleaved-1f1b", 8, 2, micro_batches)
        best = []
        for _ in range(3):
            begin = time.process_time()
            simulate(actions, even_costs(16))
            best.append(time.process_time() - begin)
        return min(best)

    assert seconds(256) < 10 * seconds(64)
