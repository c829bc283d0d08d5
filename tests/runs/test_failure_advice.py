"""Overrides that a failure's remedy names are accepted: by the schema, and by the checks of a small job."""

from __future__ import annotations

import re

import pytest

from nanoscale.common.devices import Devices
from nanoscale.config.rules import check
from nanoscale.runs import failure
from nanoscale.runs.failure import Evidence, RankFailure
from tests.support.recipes import changed, debug_recipe

HERE = {"kind": "ended", "rank": 0, "local_rank": 0, "host": "h", "time": 1.0}
RANK = RankFailure(**HERE)  # type: ignore[arg-type]
VALUES = {
    "train.micro_batch": "train.micro_batch=1",
    "zero.stage": "zero.stage=1",
    "run.root": "run.root=elsewhere",
    "checkpoint.keep_last": "checkpoint.keep_last=2",
    "optimizer.lr": "optimizer.lr=1e-4",
    "scheduler.warmup_steps": "scheduler.warmup_steps=8",
    "launcher.lost_after_s": "launcher.lost_after_s=60",
    "launcher.collective_timeout_s": "launcher.collective_timeout_s=1200",
}
"""keys that a remedy names without a value, and one in its direction"""
REMEDIES = {
    *map(failure._remedy, failure.diagnoses()["by_text"]),
    *map(failure._remedy, failure.diagnoses()["by_signal"].values()),
    failure._diagnose_kill(Evidence(oom_kills=1))[1],
    failure._diagnose_kill(Evidence())[1],
    failure.stopped_rank(0, 0, "h").remedy,
    failure.absent_ranks([RANK], {}, "").remedy,
    "a larger launcher.stop_grace_s",
}
NAMED = re.compile(
    r"\b(?:[a-z]+\.[a-z_]+(?:\.[A-Z]+)?|precision|zero|checkpoint)=[\w./]+|\b[a-z]+\.[a-z_]+\b"
)
NO_KEYS = {"failure.json", "config.yaml", "pytorch.org", "recorder.rank"}
OVERRIDES = sorted(
    {VALUES.get(it, it) for text in REMEDIES for it in NAMED.findall(text)} - NO_KEYS
)


def test_each_key_of_a_remedy_is_typed_back() -> None:
    keys = {it.partition("=")[0] for it in OVERRIDES}
    assert set(VALUES) <= keys and {"launcher.master_port", "optimizer.clip_norm"} <= keys
    assert {"launcher.env.CC", "launcher.device", "backend.compile"} <= keys


@pytest.mark.parametrize("word", OVERRIDES)
def test_the_override_that_a_remedy_names_is_accepted(word: str) -> None:
    if word == "launcher.stop_grace_s":
        word = f"{word}={2 * debug_recipe().config.launcher.stop_grace_s:g}"
    check(changed(word), Devices("cpu", 2))
