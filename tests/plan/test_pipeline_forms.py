"""Closed forms, compared with the simulation, which uses none of them."""

from __future__ import annotations

import random

import pytest

from nanoscale.config.layout import ONE_STAGE
from nanoscale.plan.pipeline.closed_forms import bubble
from nanoscale.plan.pipeline.orders import order
from nanoscale.plan.pipeline.residents import in_flight, residents
from nanoscale.plan.pipeline.simulation import simulate, transfers_overlap
from tests.plan.schedules import SCHEDULES, batches, even_costs

PIPELINES = pytest.mark.parametrize("pp", [2, 3, 4, 5, 8])
EVERY = pytest.mark.parametrize(("schedule", "virtual"), SCHEDULES)


def filled(schedule: str, pp: int, virtual: int, micro_batches: int) -> bool:
    """True if there are enough micro batches for the form to be exact."""
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
    costs: tuple[float, float, float],
    transfer: float,
) -> float:
    """Return the share of the step by which the simulated step is longer than the form."""
    every = even_costs(pp * virtual, *costs, transfer, transfers_overlap(schedule))
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
    costs = even_costs(4 * virtual, 1, 2, 0.5, overlap=transfers_overlap(schedule))
    timeline = simulate(order(schedule, 4, virtual, 12), costs)
    idle = bubble(schedule, 4, virtual, 12, 1, 2, 0.5)
    assert idle / (idle + virtual * 12 * 3.5) == pytest.approx(timeline.bubble_fraction)


def test_published_bubbles():
    """8 ranks with f = 1, b = 2, by the work: GPipe 7/m; interleaved in 2, half of that; ZB-H1 7/3m."""
    assert bubble("gpipe", 8, 1, 24) / (24 * 3) == pytest.approx(7 / 24)
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
