"""Ranks and hosts that are the last in every step are named, and nobody where the times are even."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nanoscale.train.stragglers import Stragglers

ROOT = Path(__file__).parents[2]


def sentences(times, stages, hosts):
    """Return the sentences about steps, fp64 `[steps, ranks]`, of about 1 s each."""
    found = Stragglers(stages, hosts)
    said = [found.add(step, list(seconds), 1.0) for step, seconds in enumerate(times, 1)]
    return [sentence for sentence in said if sentence is not None]


def noise(seed, ranks, steps=60):
    return 1 + 0.01 * np.random.default_rng(seed).standard_normal((steps, ranks))


@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_a_slow_rank_is_named_once_and_nobody_where_times_are_even(ranks):
    hosts = [f"n{rank // 4}" if ranks > 4 else f"n{rank}" for rank in range(ranks)]
    for seed in range(20):
        times = noise(seed, ranks)
        assert sentences(times, [range(ranks)], hosts) == []
        times[30:, 1] += 0.05
        (said,) = sentences(times, [range(ranks)], hosts)
        assert (
            said.startswith(f"rank 1 on {hosts[1]} arrives ")
            and "late in every step since step" in said
        )


def test_a_slow_host_is_named_instead_of_its_ranks():
    hosts = ["a"] * 4 + ["b"] * 4 + ["c"] * 4
    times = noise(1, 12)
    times[:, 4:8] += 0.04
    (said,) = sentences(times, [range(12)], hosts)
    assert said.startswith("b arrives ") and "since step 1," in said


def test_stages_of_a_pipeline_are_not_compared_with_each_other():
    times = noise(2, 4) + np.array([0, 0, 0.3, 0.3])
    assert sentences(times, [range(2), range(2, 4)], list("abcd")) == []


@pytest.mark.slow
def test_a_slow_rank_of_a_training_is_an_event(tmp_path):
    words = [
        "recipe=debug",
        "model.layers=1",
        "train.steps=30",
        "train.log_every=1",
        "launcher.device=cpu",
    ]
    words += ["launcher.threads=1", "parallel.tp=2", "parallel.dp=1", "run.name=r"]
    path = f"{ROOT / 'dev' / 'planted'}:{ROOT}"
    environment = {**os.environ, "PLANTED_FAULT": "slow x 1 100", "PYTHONPATH": path}
    command = [sys.executable, "-m", "nanoscale", "train", *words]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    events = (tmp_path / "runs" / "r" / "events.jsonl").read_text()
    assert '"straggler"' in events and "rank 1 on" in events
