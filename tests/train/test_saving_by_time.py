"""Checkpoints that are saved because of the time: at the same step on every rank, by rank 0's clock."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from nanoscale.checkpoint.store import list_checkpoints
from nanoscale.config.schema import Backend, Checkpoint, Config
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.rank_context import StopFlag
from nanoscale.train import agreement
from tests.support.jobs import (
    LONG_STEPS,
    KillBefore,
    curve,
    make_config,
    make_run,
    resumed_at,
    train,
    write_tokens,
)
from tests.support.rows import exhaustive


class MinuteAStep(StopFlag):
    """Every step takes a minute by rank 0's clock, and no time by the others'."""

    def __init__(self) -> None:
        self.minutes = 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Start the clock in the rank's process, before its training begins."""
        self.__dict__ |= state
        agreement.time = self  # type: ignore[attr-defined,assignment]

    def monotonic(self) -> float:
        return 60.0 * self.minutes if os.environ["RANK"] == "0" else 0.0

    @property
    def requested(self) -> bool:  # type: ignore[override]
        self.minutes += 1
        return False


class KilledBefore(MinuteAStep):
    """The same, but each rank is killed at the question before a step."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.killer = KillBefore(step)

    @property
    def requested(self) -> bool:  # type: ignore[override]
        return super().requested or self.killer.requested


def config_for(folder: Path, every: int = 0, minutes: float | None = 4, **changes: Any) -> Config:
    keep_last = changes.pop("keep_last", 20)
    asynchronous = changes.pop("asynchronous", False)
    checkpoint = Checkpoint(
        every=every,
        every_minutes=minutes,
        keep_last=keep_last,
        at_end=False,
        asynchronous=asynchronous,
    )
    return make_config(folder, steps=LONG_STEPS, checkpoint=checkpoint, **changes)


def saved(folder: Path, every: int = 0, minutes: float | None = 4, **changes: Any) -> list[int]:
    """Return the saved steps in a run of 20 steps, a minute each."""
    write_tokens(folder)
    config = config_for(folder, every, minutes, **changes)
    run = make_run(config)
    train(run, config, MinuteAStep())
    return steps(run)


def steps(run: RunDirectory) -> list[int]:
    return [stored.step for stored in list_checkpoints(run.checkpoints)]


LAYOUTS: list[Any] = [
    {"dp": 2, "stage": 3, "asynchronous": True},
    exhaustive({"parallel": {"pp": 2}}),
    {"parallel": {"pp": 2}, "stage": 1, "precision": "fp32", "backend": Backend(name="deepspeed")},
]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_rank_saves_by_the_first_ones_clock(tmp_path: Path, layout: dict[str, Any]) -> None:
    # Four minutes have passed before step 4, all ranks know it before step 5, and the clock restarts after it.
    assert saved(tmp_path, **layout) == [5, 10, 15, 20]


def test_one_rank_needs_no_agreement(tmp_path: Path) -> None:
    assert saved(tmp_path) == [4, 8, 12, 16, 20]


@pytest.mark.parametrize("minutes", [0, None])
def test_it_can_be_turned_off(tmp_path: Path, minutes: float | None) -> None:
    assert saved(tmp_path, minutes=minutes) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every", "expected"), [(7, [5, 7, 12, 14, 19]), exhaustive(4, [4, 8, 12, 16, 20])], ids=str
)
def test_the_clock_restarts_at_each_checkpoint(
    tmp_path: Path, every: int, expected: list[int]
) -> None:
    assert saved(tmp_path, every, dp=2) == expected


@pytest.mark.slow
def test_all_that_are_kept_are_not_those_saved_by_time(tmp_path: Path) -> None:
    """keep_last=null keeps none of them but the newest."""
    assert saved(tmp_path, every=7, keep_last=None, dp=2) == [7, 14, 19]


@pytest.mark.slow
def test_a_run_continues_from_it_bit_for_bit(tmp_path: Path) -> None:
    write_tokens(tmp_path)
    config = config_for(tmp_path, dp=2, stage=2, asynchronous=True)
    whole = make_run(config, "whole")
    train(whole, config)
    run = make_run(config)
    with pytest.raises(RuntimeError, match="died|failed"):
        train(run, config, KilledBefore(13))
    assert steps(run)[-1] in (5, 10)
    train(run, config)
    assert resumed_at(run)[0] in (5, 10) and curve(run) == curve(whole)
