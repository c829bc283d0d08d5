"""The goodput of written run directories: the name of each second."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from nanoscale.runs import status
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.goodput import Tally, goodput
from nanoscale.runs.lock import RunLock
from nanoscale.runs.status import Status
from tests.support.runs import create_run

BEGAN = 1e9
DAY = 86400.0


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return create_run(tmp_path, "r")


def happen(run: RunDirectory, *happened: tuple[float, str, dict[str, Any]]) -> None:
    """Write events of (seconds since the begin, kind, fields)."""
    lines = [
        {"time": BEGAN + at, "kind": kind, "message": "", **more} for at, kind, more in happened
    ]
    with run.events.open("a") as file:
        file.writelines(f"{json.dumps(line)}\n" for line in lines)


def log(run: RunDirectory, *records: tuple[int, float, float, dict[str, float]]) -> None:
    """Write records of (step, seconds since the begin, seconds of a step, others)."""
    with run.metrics.open("a") as file:
        for step, at, seconds, more in records:
            line = {"step": step, "time": BEGAN + at, "step_time_s": seconds, **more}
            file.write(f"{json.dumps(line)}\n")


def end(run: RunDirectory, at: float, state: status.State = "completed") -> None:
    status.write(run, Status(state, 1, BEGAN, BEGAN, BEGAN + at, 0))


def seconds(run: RunDirectory) -> dict[str, float]:
    """Return the names with seconds."""
    known = goodput(run)
    assert known is not None
    return {name: round(value, 6) for name, value in known.seconds.items() if value}


def saved(step: int, took: float, stall: float) -> dict[str, Any]:
    return {"step": step, "seconds": took, "stall_s": stall}


def test_a_run_without_an_attempt_has_none(run: RunDirectory) -> None:
    happen(run, (0, "note", {}))
    assert goodput(run) is None


def test_one_attempt(run: RunDirectory) -> None:
    happen(run, (0, "attempt", {}), (20, "running", {}), (90, "checkpoint", saved(5, 9, 3)))
    happen(run, (128, "end", {"outcome": "completed"}))
    log(
        run,
        (1, 45, 25.0, {}),
        (5, 85, 10.0, {"eval_time_s": 4}),
        (8, 125, 10.0, {"data_wait": 0.2}),
    )
    end(run, 130)
    # Steps of 10 and 8 s have a median of 9 s, so the first is 16 s longer.
    expected = {"starting": 20 + 16 + 2, "saving": 3, "evaluating": 4, "waiting": 6}
    assert seconds(run) == expected | {"training": 130 - sum(expected.values())}


def test_steps_that_are_trained_again_are_lost(run: RunDirectory) -> None:
    cause = {"since": BEGAN + 150, "cause": "n5 (its power was switched off)"}
    happen(run, (0, "attempt", {}), (10, "running", {}), (66, "checkpoint", saved(5, 8, 2)))
    happen(run, (160, "restart", cause), (170, "attempt", {"attempt": 2}))
    happen(run, (178, "resumed", {"step": 5}), (180, "running", {}), (230, "end", {}))
    log(run, *((step, 10 + 10 * step, 10.0, {}) for step in (1, 2, 3, 4, 5)))
    log(run, *((step, 130 + 10 * step, 10.0, {}) for step in range(6, 11)))
    end(run, 230)
    # Step 5 and its save ended at 66 - 8 + 2 = 60 s.
    expected = {"starting": 20, "saving": 2, "lost": 90, "repairing": 20, "training": 98}
    assert seconds(run) == expected
    known = goodput(run)
    assert known is not None and known.document()["sentence"] == (
        "42.6% of 3.8 min trained; lost: 110 s of n5 (its power was switched off), 20 s of starts, 2 s of saves"
    )


def test_a_run_that_fails_before_its_first_checkpoint_loses_all_attempts(run: RunDirectory) -> None:
    happen(run, (0, "attempt", {}), (10, "running", {}), (30, "restart", {"cause": "a"}))
    happen(run, (31, "attempt", {}), (41, "running", {}), (50, "restart", {"cause": "b"}))
    happen(run, (51, "attempt", {}), (60, "running", {}), (80, "end", {}))
    log(run, (1, 70, 10.0, {}), (2, 80, 10.0, {}))
    end(run, 80)
    assert seconds(run) == {"training": 20, "starting": 29, "lost": 29, "repairing": 2}
    known = goodput(run)
    # The steps of both attempts were lost when the second failed.
    assert known is not None and known.causes == {"a": 1 + 20, "b": 1 + 9}


def test_a_rollback_loses_the_steps_since_its_checkpoint(run: RunDirectory) -> None:
    happen(run, (0, "attempt", {}), (0, "running", {}), (50, "checkpoint", saved(5, 0, 0)))
    happen(run, (90, "rollback", {"step": 5}), (94, "running", {}), (194, "end", {}))
    end(run, 194)
    assert seconds(run) == {"training": 150, "lost": 40, "repairing": 4}


def test_a_run_that_was_resumed_after_two_days_was_queued(run: RunDirectory) -> None:
    happen(run, (0, "attempt", {}), (10, "running", {}), (60, "checkpoint", saved(5, 5, 5)))
    happen(run, (60, "end", {"outcome": "stopped"}), (60 + 2 * DAY, "attempt", {"attempt": 2}))
    happen(run, (70 + 2 * DAY, "resumed", {"step": 5}), (70 + 2 * DAY, "running", {}))
    happen(run, (110 + 2 * DAY, "end", {}))
    log(run, *((step, 10 + 9 * step, 9.0, {}) for step in range(1, 6)))
    end(run, 110 + 2 * DAY)
    assert seconds(run) == {"training": 85, "starting": 20, "saving": 5, "queued": 2 * DAY}


def test_an_earlier_failure_did_not_cause_what_a_second_ctrl_c_loses(run: RunDirectory) -> None:
    happen(run, (0, "attempt", {}), (10, "running", {}), (60, "checkpoint", saved(5, 0, 0)))
    happen(run, (60, "restart", {"cause": "a"}), (61, "attempt", {}), (62, "resumed", {"step": 5}))
    happen(run, (62, "running", {}), (72, "end", {}))  # killed by the user
    happen(run, (80, "attempt", {}), (82, "resumed", {"step": 5}), (82, "running", {}))
    happen(run, (92, "end", {}))
    end(run, 92)
    known = goodput(run)
    assert known is not None and known.causes == {"a": 1}
    assert "10 s of steps that were trained again" in known.document()["sentence"]


def test_a_running_run_is_known_until_now(run: RunDirectory) -> None:
    began = time.time() - BEGAN
    happen(run, (began - 30, "attempt", {}), (began - 20, "running", {}))
    status.write(run, Status("running", 1, BEGAN))
    with RunLock(run):
        known = goodput(run)
    assert known is not None and known.seconds["starting"] == pytest.approx(10, abs=0.01)
    assert 20 <= known.seconds["training"] < 25


def test_the_last_heartbeat_of_a_killed_launcher_ends_what_is_known(run: RunDirectory) -> None:
    happen(run, (0, "attempt", {}), (10, "running", {}))
    status.write(run, Status("running", 1, BEGAN))
    (run.path / "lock").rename(run.path / "lock.killed")
    os.utime(run.path / "lock.killed", (BEGAN + 100, BEGAN + 100))
    assert seconds(run) == {"starting": 10, "training": 90}
    # The next launcher records this heartbeat, since its own replace it.
    with RunLock(run) as lock:
        assert lock.heard == BEGAN + 100
        happen(run, (300, "attempt", {"heard": lock.heard}), (310, "resumed", {"step": 5}))
        happen(run, (310, "running", {}), (320, "end", {}))
    log(run, (5, 60, 10.0, {}))
    end(run, 320)
    assert seconds(run) == {"starting": 20, "training": 60, "lost": 40, "repairing": 200}


def test_the_metric_agrees_with_what_is_known_afterwards(run: RunDirectory) -> None:
    happen(run, (0, "attempt", {}), (10, "running", {}))
    end(run, 10)
    tally = Tally(run, 0)
    tally._began = BEGAN
    shares = [
        tally.add({"step": step, "time": BEGAN + at, "step_time_s": took})
        for step, at, took in ((1, 40, 30.0), (2, 50, 10.0), (4, 70, 10.0))
    ]
    assert shares[-1] == pytest.approx(40 / 70)


def test_a_launcher_killed_after_its_ranks_had_stopped_is_a_failure(run: RunDirectory) -> None:
    """Its ranks record an end when they lose it; only a launcher that exits releases the run."""
    happen(run, (0, "attempt", {}), (10, "running", {}), (50, "end", {"outcome": "stopped"}))
    happen(run, (80, "attempt", {"heard": BEGAN + 52}), (90, "running", {}), (100, "end", {}))
    end(run, 100)
    assert seconds(run) == {"starting": 22, "lost": 40, "training": 10, "repairing": 28}
