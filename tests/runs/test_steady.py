from __future__ import annotations

import json

import pytest

from nanoscale.runs import events
from nanoscale.runs.metrics import WARM_UP, steady
from tests.support.runs import create_run


@pytest.fixture
def run(tmp_path):
    return create_run(tmp_path, "r")


def log(run, *records):
    """Records of (step, seconds, GiB); a step has 100 tokens."""
    with run.metrics.open("a") as file:
        for step, seconds, memory in records:
            line = {"step": step, "step_time_s": seconds, "memory_gib": memory}
            line["tokens_per_s"] = 100 / seconds if seconds else None
            file.write(json.dumps(line) + "\n")


def attempt(run, number, after=None):
    events.append(run, "attempt", "", attempt=number)
    if after is not None:
        events.append(run, "resumed", "", step=after)


def test_the_first_steps_do_not_count_and_the_median_is_taken(run):
    attempt(run, 1)
    log(run, *((step, 9.0, 1.0) for step in range(1, WARM_UP + 1)))
    log(run, (4, 0.5, 2.0), (5, 0.4, 2.5), (6, 7.0, 2.5))
    found = steady(run)
    assert (found.steps, found.seconds, found.memory_gib) == (3, 0.5, 2.5)
    assert found.tokens_per_s == 200


def test_a_record_of_many_steps_counts_wholly_or_not(run):
    log(run, (10, 3.0, 1.0), (20, 1.0, 1.0), (25, 2.0, 1.0))
    assert (steady(run).steps, steady(run).seconds) == (15, 1.5)


def test_every_start_warms_up(run):
    attempt(run, 1)
    log(run, (5, 1.0, 1.0), (10, 1.0, 1.0))
    attempt(run, 2, after=10)
    log(run, (11, 8.0, 1.0), (14, 8.0, 1.0), (15, 2.0, 1.0))
    assert (steady(run).steps, steady(run).seconds) == (6, 1.5)


def test_what_was_trained_in_another_configuration_is_another_matter(run):
    attempt(run, 1)
    log(run, (10, 1.0, 9.0), (20, 1.0, 9.0))
    run.attempt_config(1).touch()
    attempt(run, 2, after=20)
    log(run, (22, 4.0, 2.0), (24, 3.0, 2.0), (26, 2.0, 2.0))
    found = steady(run)
    assert (found.steps, found.seconds, found.memory_gib) == (2, 2.0, 2.0)


def test_nothing_logged_and_no_numbers(run):
    assert (steady(run).steps, steady(run).seconds) == (0, None)
    log(run, (10, None, None), (20, None, None))
    assert (steady(run).steps, steady(run).seconds, steady(run).memory_gib) == (0, None, None)
