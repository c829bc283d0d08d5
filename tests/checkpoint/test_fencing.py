"""Law 3 between attempts: an attempt that the run has continued without changes nothing, at any time."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoscale.checkpoint import sharded, store
from nanoscale.config.schema import Config
from nanoscale.metrics.sinks import open_sinks
from nanoscale.metrics.trackers import Subject
from nanoscale.parallel import process_group
from nanoscale.runs import events, fence
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.failure import Evidence, RankFailure, diagnose
from nanoscale.runs.fence import FencedError
from nanoscale.runs.rank_context import RankContext, StopFlag
from nanoscale.train.job import make_note
from tests.support.ranks import run_ranks
from tests.support.runs import create_run

STATE = {"a": torch.arange(10.0), "b": torch.ones(3, 5)}
ROOT = str(Path(__file__).parents[2])


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run whose first attempt has begun and saved three checkpoints."""
    return begun(tmp_path)


def begun(folder: Path) -> RunDirectory:
    run = create_run(folder, "x")
    fence.begin(run, 1)
    for step in (1, 2, 3):
        sharded.save(run.workspace(1), STATE, {"step": step})
    return run


def contents(run: RunDirectory) -> dict[str, Any]:
    """Return the content of `checkpoints/`, without files that are being deleted."""
    assert all(not store.find_damage(c.path) for c in store.list_checkpoints(run.checkpoints))
    return {
        path.name: path.readlink() if path.is_symlink() else path.stat().st_ino
        for path in run.checkpoints.iterdir()
        if not path.name.startswith(".deleting-")
    }


class Suspended:
    """A fence: the second attempt begins just before the n-th file system operation."""

    ACTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.scandir")
    current: Suspended | None = None

    def __init__(self, run: RunDirectory, number: int) -> None:
        self.run, self.left = run, number
        self.before: dict[str, Any] | None = None

    def __enter__(self) -> Suspended:
        Suspended.current = self
        return self

    def __exit__(self, *_: object) -> None:
        Suspended.current = None

    def look(self, act: str, arguments: tuple[Any, ...]) -> None:
        path = str(arguments[0])
        within = path.startswith(str(self.run.path)) or not path.startswith("/")
        if act not in self.ACTS or not within:
            return
        if self.left == 0:
            Suspended.current = None
            fence.begin(self.run, 2)
            self.before = contents(self.run)
            Suspended.current = self
        self.left -= 1


def hook(act: str, arguments: tuple[Any, ...]) -> None:
    if Suspended.current is not None:
        Suspended.current.look(act, arguments)


sys.addaudithook(hook)


def save(run: RunDirectory) -> None:
    sharded.save(run.workspace(1), STATE, {"step": 4})


def prune(run: RunDirectory) -> None:
    store.prune(run.workspace(1), 1, None)


def set_aside(run: RunDirectory) -> None:
    store.set_aside(run.workspace(1), store.list_checkpoints(run.checkpoints)[-1])


@pytest.mark.parametrize(("act", "least"), [(save, 12), (prune, 10), (set_aside, 4)])
def test_nothing_changes_after_the_next_attempt_has_begun(
    tmp_path: Path, act: Callable[[RunDirectory], None], least: int
) -> None:
    """Before every single thing that is done to the file system, this might be suspended for minutes."""
    number = fenced = 0
    while True:
        run = begun(tmp_path / str(number))
        with Suspended(run, number) as suspended:
            try:
                act(run)
            except FencedError as error:
                assert str(error) == (
                    "the run has continued without this rank (attempt 2 is running)"
                )
                fenced += 1
        if suspended.before is None:
            break
        assert contents(run) == suspended.before
        fence.end(run)
        assert not [path for path in run.checkpoints.iterdir() if path.name.startswith(".")]
        number += 1
    assert number >= least and fenced >= number - 3  # the last acts may only look or tidy up


def late_rank(rank: int, workspace: Path) -> str:
    process_group.join(2, torch.device("cpu"), 60)
    try:
        sharded.save(workspace, STATE, {"step": 4})
    except FencedError as error:
        return str(error)
    return "saved"


def test_every_rank_learns_that_the_run_has_gone_on(run: RunDirectory) -> None:
    fence.begin(run, 2)
    said = "the run has continued without this rank (attempt 2 is running)"
    assert run_ranks(late_rank, 2, run.workspace(1)) == [said] * 2
    assert run_ranks(late_rank, 2, run.workspace(2)) == ["saved"] * 2


RANK = """
import sys
from pathlib import Path
from nanoscale.checkpoint import store
from nanoscale.runs.fence import FencedError, explained
workspace = Path(sys.argv[1])
step = 10
try:
    while True:
        staging = store.staging_path(workspace, step)
        with explained(workspace):
            staging.mkdir()
            for number in range(3):
                (staging / str(number)).write_bytes(bytes(100))
            sums = store.sum_files(sorted(staging.iterdir()))
        store.publish(staging, {"step": step}, sums)
        store.prune(workspace, 2, None)
        print(step, flush=True)
        step += 1
except FencedError:
    print("fenced", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("suspended", [False, True])
def test_a_rank_at_work_is_fenced_from_one_moment_to_the_next(
    run: RunDirectory, suspended: bool
) -> None:
    chance = random.Random(7)
    for attempt in range(1, 13):
        command = [sys.executable, "-c", RANK, str(run.workspace(attempt))]
        environment = {**os.environ, "PYTHONPATH": ROOT}
        rank = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        try:
            assert rank.stdout is not None and rank.stdout.readline().strip().isdecimal()
            time.sleep(chance.uniform(0, 0.02))
            if suspended:
                rank.send_signal(signal.SIGSTOP)
            fence.begin(run, attempt + 1)
            before = contents(run)
            rank.send_signal(signal.SIGCONT)
            assert rank.communicate(timeout=120)[0].splitlines()[-1] == "fenced"
        finally:
            rank.kill()
            rank.wait()
        assert contents(run) == before
        for path in run.checkpoints.glob("step-*"):
            path.rename(run.checkpoints / f"old-{attempt}-{path.name}")


def context(run: RunDirectory, attempt: int) -> RankContext:
    return RankContext(run, Config(), 0, 0, 1, "h", attempt, StopFlag())


def test_the_record_of_a_run_is_the_last_attempts(run: RunDirectory) -> None:
    def record(step: int) -> dict[str, Any]:
        return {"step": step, "loss": 1.0, "time": 1.0}

    old = open_sinks(Subject(run, Config(), run.workspace(1), 1), 3)[0]
    old.write(record(4))
    note = make_note(context(run, 1))
    note("checkpoint", "saved")
    fence.begin(run, 2)
    new = open_sinks(Subject(run, Config(), run.workspace(2), 2), 3)[0]
    new.write(record(4))
    before = run.metrics.read_text(), run.events.read_text()
    with pytest.raises(FencedError):
        old.write(record(5))
    with pytest.raises(FencedError):
        note("checkpoint", "saved")
    with pytest.raises(FencedError):
        open_sinks(Subject(run, Config(), run.workspace(1), 1), 0)
    assert (run.metrics.read_text(), run.events.read_text()) == before
    assert len(before[0].splitlines()) == 1
    make_note(context(run, 2))("checkpoint", "saved")
    assert [event["kind"] for event in events.read(run)].count("checkpoint") == 2


def test_the_diagnosis_says_which_attempt_is_running(run: RunDirectory) -> None:
    fence.begin(run, 2)
    with pytest.raises(FencedError) as caught:
        store.prune(run.workspace(1), 1, None)
    raised = RankFailure.of(caught.value, rank=0, local_rank=0, host="h")
    diagnosis, remedy = diagnose(raised, Evidence())
    assert diagnosis.startswith("the run has continued without this rank (attempt 2 is running)")
    assert "this rank needs no action" in remedy


def test_another_error_stays_what_it_is(run: RunDirectory) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        store.publish(run.workspace(1) / "no-such-folder", {"step": 4}, {})
    assert not isinstance(caught.value, FencedError)
