"""Ranks and hosts that are the last in every step are named, and nobody where the times are even."""

from __future__ import annotations

import time
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanoscale.models.transformer import Transformer
from nanoscale.runs import events
from nanoscale.runs.rank_context import StopFlag
from nanoscale.train.step_log import Stragglers
from tests.support.jobs import make_config, make_run, train_rank, write_tokens
from tests.support.ranks import run_ranks
from tests.support.rows import exhaustive


def sentences(times, stages, hosts, step_s=1.0):
    """Return the sentences about steps, fp64 `[steps, ranks]`, of about 1 s each."""
    found = Stragglers(stages, hosts)
    said = [found.add(step, list(seconds), step_s) for step, seconds in enumerate(times, 1)]
    return [sentence for sentence, _, _ in filter(None, said)]


def noise(seed, ranks, steps=60):
    return 1 + 0.01 * np.random.default_rng(seed).standard_normal((steps, ranks))


@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_a_slow_rank_is_named_once_and_nobody_where_times_are_even(ranks):
    hosts = [f"n{rank // 4}" if ranks > 4 else f"n{rank}" for rank in range(ranks)]
    for seed in range(20):
        times = noise(seed, ranks)
        assert sentences(times, [range(ranks)], hosts) == []
        times[30:, 1] += 0.08
        (said,) = sentences(times, [range(ranks)], hosts)
        assert (
            said.startswith(f"rank 1 on {hosts[1]} arrives ")
            and "late in every step since step" in said
        )


def test_a_slow_host_is_named_instead_of_its_ranks():
    hosts = ["a"] * 4 + ["b"] * 4 + ["c"] * 4
    times = noise(1, 12)
    times[:, 4:8] += 0.08
    (said,) = sentences(times, [range(12)], hosts)
    assert said.startswith("b arrives ") and "since step 1," in said


@pytest.mark.parametrize(("least", "ratios"), [(inf, [1.1]), (1.6, [1.1]), (1.3, [1.1, 1.3, 1.5])])
def test_a_host_whose_ratio_reaches_the_bound_is_reported_again(least, ratios):
    """The window of 20 steps moves from 1.1 to 1.5, with a median of 1.3 in between."""
    found, times = Stragglers([range(4)], ["a", "a", "b", "b"], least), np.ones((90, 4))
    times[10:50, 2:] += 0.1
    times[50:, 2:] += 0.5
    reports = filter(None, (found.add(step, list(row), 1.0) for step, row in enumerate(times, 1)))
    assert [(host, round(ratio, 3)) for _, host, ratio in reports] == [("b", it) for it in ratios]


def test_stages_of_a_pipeline_are_not_compared_with_each_other():
    times = noise(2, 4) + np.array([0, 0, 0.3, 0.3])
    assert sentences(times, [range(2), range(2, 4)], list("abcd")) == []


def test_a_rank_is_late_only_by_a_share_of_the_step():
    """Their own time may be a small part of it: 2 ms of a step of 300 ms are nothing that anybody waits for."""
    times = 0.01 * noise(3, 2)
    times[:, 1] += 0.012
    assert sentences(times, [range(2)], "ab", step_s=0.3) == []
    assert len(sentences(times, [range(2)], "ab", step_s=0.1)) == 1


def test_a_rank_of_another_stage_that_is_slower_beside_the_latest_is_not_named():
    times = 0.1 * noise(4, 4) + np.array([0, 0.3, 0.09, 0])
    (said,) = sentences(times, [range(2), range(2, 4)], list("abcd"))
    assert said.startswith("rank 1 on b arrives")
    times[:, 2] += 0.2
    (said,) = sentences(times, [range(2), range(2, 4)], list("abcd"))
    assert said.startswith("rank 1 on b and rank 2 on c arrive")


def late_rank(rank: int, path: Path, late: int) -> str:
    """Train, and compute 15 ms longer than the others in each step as one of the ranks.

    They are 15 ms on a core: time without one is not the rank's own.
    """
    forward = Transformer.forward

    def longer(*args: Any, **options: Any) -> Any:
        end = time.thread_time() + 0.015
        while rank == late and time.thread_time() < end:
            pass
        return forward(*args, **options)

    Transformer.forward = longer
    return train_rank(rank, path, StopFlag())


@pytest.mark.slow
@pytest.mark.parametrize("late", [1, None])
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"dp": 4}, id="dp 4"),
        exhaustive({"dp": 2, "parallel": {"pp": 2}}, name="pp dp"),
    ],
)
def test_the_late_rank_of_a_training_is_an_event(tmp_path, layout, late):
    """Ranks that are more than the cores wait for one in turn, which is not their own time."""
    write_tokens(tmp_path)
    config = make_config(tmp_path, steps=30, micro_batch=2, **layout)
    config = replace(config, train=replace(config.train, log_every=1))
    run = make_run(config)
    run_ranks(late_rank, config.world_size, run.path, late)
    named = [event["message"] for event in events.read(run) if event["kind"] == "straggler"]
    assert [message.startswith("rank 1 on ") for message in named] == (
        [] if late is None else [True]
    )
