"""Closed forms against the simulation, in which nothing of them is used."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest

from nanoscale.config.stages import ONE_STAGE, V_SHAPED
from nanoscale.plan.pipeline import (
    Costs,
    bubble,
    bubble_fraction,
    estimate,
    first_stage_undivided,
    in_flight,
    order,
    residents,
    simulate,
    transfers_overlap,
)
from tests.plan.schedules import SCHEDULES, batches

PIPELINES = pytest.mark.parametrize("pp", [2, 3, 4, 5, 8])
EVERY = pytest.mark.parametrize(("schedule", "virtual"), SCHEDULES)


def filled(schedule: str, pp: int, virtual: int, micro_batches: int) -> bool:
    """Whether there are enough micro batches for the form to be exact."""
    if schedule == "zbv":
        return micro_batches >= 2 * pp - 1
    return schedule != "zero-bubble" or virtual == 1 or micro_batches >= pp


def usual(chance: random.Random) -> tuple[float, float, float]:
    """Forward, inputs, weights: attention and recomputation make the second longer, nothing the third."""
    return 1.0, chance.uniform(1.0, 2.5), chance.uniform(0.4, 1.0)


def shortfall(
    schedule: str,
    pp: int,
    virtual: int,
    micro_batches: int,
    costs: tuple[float, ...],
    transfer: float,
) -> float:
    """By how much of the step the simulated step is longer than the form says."""
    every = Costs.even(pp * virtual, *costs, transfer, transfers_overlap(schedule))
    step = simulate(order(schedule, pp, virtual, micro_batches), every).makespan
    form = bubble(schedule, pp, virtual, micro_batches, *costs, transfer)
    return (step - form - virtual * micro_batches * sum(costs)) / step


@EVERY
@PIPELINES
def test_bubbles_without_transfers_are_exact(schedule, virtual, pp):
    chance = random.Random(pp)
    for micro_batches in batches(schedule, pp):
        if filled(schedule, pp, virtual, micro_batches):
            for _ in range(3):
                costs = (chance.random() ** 2, chance.random() ** 2, chance.random() ** 2 + 0.01)
                off = shortfall(schedule, pp, virtual, micro_batches, costs, 0.0)
                assert off == pytest.approx(0, abs=1e-9), (micro_batches, costs)


@EVERY
@PIPELINES
def test_bubbles_of_pipelines_that_are_not_filled_are_near(schedule, virtual, pp):
    chance = random.Random(pp)
    for micro_batches in batches(schedule, pp):
        if not filled(schedule, pp, virtual, micro_batches):
            off = shortfall(schedule, pp, virtual, micro_batches, usual(chance), 0.0)
            assert -1e-9 <= off < 0.08, micro_batches


@EVERY
@PIPELINES
@pytest.mark.parametrize(("share", "most"), [(0.5, 0.10), (0.1, 0.02)])
def test_bubbles_with_transfers_are_near(schedule, virtual, pp, share, most):
    chance = random.Random(pp)
    for micro_batches in batches(schedule, pp):
        exact = schedule in ONE_STAGE or schedule == "looped-bfs"
        bound = 1e-9 if exact else most
        if not filled(schedule, pp, virtual, micro_batches):
            bound = 0.08
        off = shortfall(schedule, pp, virtual, micro_batches, usual(chance), share)
        assert -1e-9 <= off < bound, micro_batches


@EVERY
def test_the_fraction_is_the_simulated_one(schedule, virtual):
    costs = Costs.even(4 * virtual, 1, 2, 0.5, overlap=transfers_overlap(schedule))
    timeline = simulate(order(schedule, 4, virtual, 12), costs)
    fraction = bubble_fraction(schedule, 4, virtual, 12, 1, 2, 0.5)
    assert fraction == pytest.approx(timeline.bubble_fraction)


def test_published_bubbles():
    """Of 8 ranks with f = 1, b = 2: GPipe 7/(m+7); interleaved in 2, half of it over the same work; ZB-H1
    7/3m."""
    assert bubble_fraction("gpipe", 8, 1, 24, 1, 1, 1) == pytest.approx(7 / 31)
    assert bubble("interleaved-1f1b", 8, 2, 24, 0.5, 0.5, 0.5) == pytest.approx(7 * 3 / 2)
    assert bubble("zero-bubble", 8, 1, 24) / (24 * 3) == pytest.approx(7 / (3 * 24))


def test_there_is_no_bubble_without_a_pipeline():
    assert bubble("1f1b", 1, 1, 5) == 0
    assert in_flight("1f1b", 1, 1, 5) == ((1,),)


@EVERY
@PIPELINES
def test_in_flight_is_what_the_order_holds(schedule, virtual, pp):
    for micro_batches in batches(schedule, pp):
        held = [residents(actions).held for actions in order(schedule, pp, virtual, micro_batches)]
        assert in_flight(schedule, pp, virtual, micro_batches) == tuple(map(tuple, held))


@EVERY
@PIPELINES
def test_a_heavier_last_stage_is_estimated(schedule, virtual, pp):
    most = 0.12 if schedule in V_SHAPED else 0.07 if schedule == "zero-bubble" else 0.02
    chance = random.Random(pp)
    for micro_batches in (2 * pp, 4 * pp):
        forward, inputs, weights = usual(chance)
        costs = Costs.even(
            pp * virtual, forward, inputs, weights, 0.05, transfers_overlap(schedule)
        )
        last = {name: [*getattr(costs, name)[:-1], getattr(costs, name)[-1] * 1.3]
                for name in ("forward", "backward_input", "backward_weight")}  # fmt: skip
        costs = replace(costs, **last)
        actions = order(schedule, pp, virtual, micro_batches)
        about = estimate(schedule, pp, virtual, micro_batches, costs)
        for real in (costs, first_stage_undivided(costs)):
            step = simulate(actions, real).makespan
            assert -0.01 < about / step - 1 < most


def test_forms_are_fast_enough_for_a_search():
    """Generous for slow machines: a call is a few microseconds."""
    begin = time.process_time()
    for micro_batches in range(2, 2002):
        bubble("zbv", 16, 2, micro_batches, 1, 2, 0.5, 0.1)
        in_flight("1f1b", 16, 1, micro_batches + 16)
    assert time.process_time() - begin < 1.0
