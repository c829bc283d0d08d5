"""Checkpoints written in the background of a training: of their step, and complete or absent."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.torch_version import TorchVersion

from nanoscale.checkpoint import configuration, sharded
from nanoscale.checkpoint.saver import Saver
from nanoscale.checkpoint.staging import Staging
from nanoscale.checkpoint.store import list_checkpoints
from nanoscale.config.composing import frozen
from nanoscale.config.schema import Backend, Checkpoint, Config
from nanoscale.parallel import process_group
from nanoscale.runs import events, fence
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.rank_context import RankContext, StopFlag
from nanoscale.train.checkpointing import Callbacks, CheckpointWriter
from nanoscale.train.job import make_note
from tests.support.jobs import (
    LONG_STEPS,
    KillBefore,
    curve,
    make_config,
    make_run,
    read_metrics,
    tensors_of,
    train,
    write_tokens,
)
from tests.support.ranks import run_ranks
from tests.support.rows import exhaustive
from tests.support.runs import create_run


def config_for(folder: Path, every: int, asynchronous: bool = True, **changes: Any) -> Config:
    saving = Checkpoint(every=every, keep_last=None, at_end=False, asynchronous=asynchronous)
    return make_config(folder, steps=LONG_STEPS, checkpoint=saving, **changes)


class Held(StopFlag):
    """Holds the checkpoint of one step back until the question before a later step."""

    def __init__(self, folder: Path, held: int, until: int) -> None:
        self.folder, self.held, self.until = folder, held, until
        self.questions = 0
        self.gate: threading.Event | None = None

    @property
    def requested(self) -> bool:  # type: ignore[override]
        self.questions += 1
        if self.gate is None:
            self._hold()
        if self.questions == self.until:
            assert self.held not in [stored.step for stored in list_checkpoints(self.folder)]
            self.open()
        return False

    def open(self) -> None:
        assert self.gate is not None
        self.gate.set()

    def _hold(self) -> None:
        gate = self.gate = threading.Event()
        write = sharded.save

        def wait_and_write(workspace: Path, state: Any, about: Any, group: Any) -> Path:
            assert about["step"] != self.held or gate.wait(60)
            return write(workspace, state, about, group)

        sharded.save = wait_and_write  # type: ignore[assignment]
        _copy_late()


def _copy_late() -> None:
    """Let the state be copied at the last moment: when the next update waits for it."""
    waited_for = threading.Event()
    fill, hold = Staging.fill, Staging.hold

    def late_fill(self: Staging) -> None:
        assert waited_for.wait(60)
        waited_for.clear()
        fill(self)

    def telling_hold(self: Staging) -> float:
        if not self._filled.is_set():
            waited_for.set()
        return hold(self)

    Staging.fill, Staging.hold = late_fill, telling_hold  # type: ignore[method-assign]


class HeldAndKilled(Held):
    """A flag that kills its rank at the step at which `Held` releases the checkpoint."""

    def open(self) -> None:
        KillBefore(0).requested  # noqa: B018


LAYOUTS = [
    {},
    exhaustive({"dp": 2, "stage": 3, "parallel": {"tp": 2}}),
    {"dp": 2, "stage": 2, "precision": "fp32", "backend": Backend(name="deepspeed")},
]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_what_is_written_is_of_its_step(tmp_path: Path, layout: dict[str, Any]) -> None:
    write_tokens(tmp_path)
    waiting = make_run(config_for(tmp_path, 6, False, **layout), "waiting")
    train(waiting, config_for(tmp_path, 6, False, **layout))
    beside = make_run(config_for(tmp_path, 6, **layout), "beside")
    train(beside, config_for(tmp_path, 6, **layout), Held(beside.checkpoints, held=6, until=10))
    assert curve(beside) == curve(waiting)
    for one, other in zip(
        list_checkpoints(beside.checkpoints), list_checkpoints(waiting.checkpoints), strict=True
    ):
        ours, theirs = tensors_of(one), tensors_of(other)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
        recorded = one.manifest[configuration.IN_MANIFEST]
        assert recorded == configuration.values(frozen.load(beside.config))
    saved = [event for event in events.read(beside) if event["kind"] == "checkpoint"]
    assert [event["step"] for event in saved] == [6, 12, 18]
    assert saved[0]["stall_s"] < saved[0]["seconds"]


@pytest.mark.slow
def test_killed_while_one_is_written(tmp_path: Path) -> None:
    """The previous one exists, and the training resumes from it bit for bit."""
    write_tokens(tmp_path)
    config = config_for(tmp_path, 6, dp=2, stage=2)
    whole = make_run(config, "whole")
    train(whole, config)
    run = make_run(config)
    with pytest.raises(RuntimeError, match="died|failed"):
        train(run, config, HeldAndKilled(run.checkpoints, held=12, until=15))
    assert steps(run) == [6]
    train(run, config)
    assert curve(run) == curve(whole)
    assert steps(run) == [6, 12, 18]


class Full(StopFlag):
    """A flag after which one rank's files cannot grow, as on a full disk, from a step on."""

    def __init__(self, step: int) -> None:
        self.questions, self.step = 0, step

    @property
    def requested(self) -> bool:  # type: ignore[override]
        self.questions += 1
        if self.questions == self.step and process_group.rank() == 1:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
        return False


@pytest.mark.slow
def test_what_cannot_be_written_ends_the_run(tmp_path: Path) -> None:
    write_tokens(tmp_path)
    config = config_for(tmp_path, 6, dp=2, stage=2)
    run = make_run(config)
    with pytest.raises(RuntimeError, match=r"File too large.*step-00000012"):
        train(run, config, Full(10))
    assert steps(run) == [6]
    assert read_metrics(run)[-1]["step"] < 18


def steps(run: RunDirectory) -> list[int]:
    return [stored.step for stored in list_checkpoints(run.checkpoints)]


def test_an_old_checkpoint_that_cannot_be_deleted_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named once, with the command that deletes it; the others are deleted as ever."""
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path.name == "step-00000001" and target.name.startswith("deleting-"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    run = create_run(tmp_path, "my run")
    fence.begin(run, 1)
    saver = Saver(run.workspace(1), Checkpoint(keep_last=1, asynchronous=False), rank=0)
    writer = cast(Any, SimpleNamespace(note=make_note(context(run)), callbacks=Callbacks()))
    for step in (1, 2, 3, 4):
        saved = saver.write({"a": torch.ones(3)}, {"step": step})
        CheckpointWriter.report(writer, saved)
    assert [stored.step for stored in list_checkpoints(run.checkpoints)] == [1, 4]
    (event,) = [event for event in events.read(run) if event["kind"] == "undeleted"]
    assert event["step"] == 1 and "(Permission denied); the training continues" in event["message"]
    assert f"rm -r '{run.checkpoint(1)}'" in event["message"]


def context(run: RunDirectory) -> RankContext:
    return RankContext(run, Config(), 0, 0, 1, "localhost", 1, StopFlag())


def recorded_groups(rank: int, version: str, asynchronous: bool, folder: str) -> list[int]:
    """Return the sizes of tensors that the flight recorder saw in collectives while a Saver was made."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = "64"  # ranks.join turns it off on CPUs alone
    torch.__version__ = TorchVersion(version)
    process_group.join(2, torch.device("cpu"), 60.0)
    before = len(recorded())
    Saver(Path(folder), Checkpoint(asynchronous=asynchronous), rank)
    return [entry["input_sizes"][0][0] for entry in recorded()[before:]]


def recorded() -> list[dict[str, Any]]:
    c10d: Any = torch._C._distributed_c10d
    found: list[dict[str, Any]] = json.loads(c10d._dump_fr_trace_json(True, False)).get(
        "entries", []
    )
    return found


@pytest.mark.parametrize(
    ("version", "asynchronous", "seen"),
    [
        ("2.11.0+cu130", True, [1]),
        ("2.12.1", True, [1]),
        ("2.13.0+cu130", True, []),
        ("2.11.0", False, []),
    ],
)
def test_the_flight_recorder_knows_the_group_before_a_second_thread_uses_it(
    tmp_path: Path, version: str, asynchronous: bool, seen: list[int]
) -> None:
    """In older versions it adds a group without a lock, at the group's first collective."""
    assert run_ranks(recorded_groups, 2, version, asynchronous, str(tmp_path)) == [seen, seen]
