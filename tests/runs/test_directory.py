from __future__ import annotations

import errno
import os
import stat
from contextlib import nullcontext
from pathlib import Path

import pytest

from nanoscale.common.errors import UserError
from nanoscale.runs import directory
from nanoscale.runs.directory import (
    RunDirectory,
    free_name,
    free_names,
    read_json,
    write_atomically,
)
from tests.support.runs import create_run


def make(root, name="x"):
    run = create_run(root, name)
    run.config.write_text("train: {}\n")
    return run


def suggestions(error):
    return [text for violation in error.value.violations for text in violation.suggestions]


def test_the_layout(tmp_path):
    run = make(tmp_path / "runs")
    assert run.path == tmp_path / "runs" / "x"
    assert run.log(2, "h", 3, "out") == run.path / "logs/attempt-2/h.rank-3.out"
    assert run.rank_failure(2, "h", 3).parent == run.log(2, "h", 3, "err").parent
    assert run.checkpoint(7) == run.path / "checkpoints/step-00000007"
    names = sorted(p.name for p in run.path.iterdir())
    assert names == ["checkpoints", "config.yaml", "lock", "logs"]


def test_a_name_that_is_taken(tmp_path):
    make(tmp_path)
    make(tmp_path, "x-2")
    with pytest.raises(UserError) as error:
        create_run(tmp_path, "x")
    assert suggestions(error) == ["run.name=x-3", f"nanoscale resume {tmp_path / 'x'}"]
    assert free_name(tmp_path, "new") == "new"


@pytest.mark.parametrize(
    "name", ["", "../x", "a/b", ".hidden", "-rf", "a\nb", "n" * 201, "é" * 101]
)
def test_a_name_that_cannot_be(tmp_path, name):
    with pytest.raises(UserError, match="cannot name a run"):
        create_run(tmp_path / "runs", name)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_of_a_run_that_could_not_be_built(tmp_path):
    def build():
        with RunDirectory.build(tmp_path / "deep" / "runs", "x") as aside:
            (aside.path / "config.yaml").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build()
    assert list(tmp_path.iterdir()) == []


def test_a_run_appears_whole(tmp_path):
    with RunDirectory.build(tmp_path, "x") as aside:
        assert not (tmp_path / "x").exists()
        assert RunDirectory.all(tmp_path) == []
        aside.config.write_text("whole")
    assert (tmp_path / "x" / "config.yaml").read_text() == "whole"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_the_slower_of_two_with_one_name_is_refused(tmp_path):
    def build():
        with RunDirectory.build(tmp_path, "x"):
            make(tmp_path, "x")

    with pytest.raises(UserError, match="exists already"):
        build()
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("root", ["/proc/self/runs", "FILE", "FILE/deeper"])
def test_a_root_that_cannot_be_written_to(tmp_path, root):
    (tmp_path / "file").write_text("")
    root = Path(root.replace("FILE", str(tmp_path / "file")))
    with pytest.raises(UserError, match="no run can be created in"):
        create_run(root, "x")


def test_a_root_that_cannot_be_written_to_is_seen_before_anything_is_made():
    """Permissions do not tell: to root, they allow it."""
    with pytest.raises(UserError, match="no run can be created in /proc/runs: cannot write in"):
        directory.check_root(Path("/proc/runs"))


def test_opening_by_path_and_by_name(tmp_path, monkeypatch):
    run = make(tmp_path / "runs", "tiny-1")
    monkeypatch.chdir(tmp_path)
    assert RunDirectory.open("tiny-1") == RunDirectory.open("runs/tiny-1") == run
    assert RunDirectory.open(run.path) == run
    assert run.reference == "tiny-1"
    assert make(tmp_path / "other").reference == "other/x"
    with pytest.raises(UserError) as error:
        RunDirectory.open("tiny1")
    assert suggestions(error) == ["tiny-1"]
    with pytest.raises(UserError, match="is not a run directory"):
        RunDirectory.open(tmp_path)


@pytest.mark.parametrize(("number", "matters"), [(errno.EINVAL, False), (errno.EIO, True)])
def test_a_folder_is_made_durable_where_the_file_system_can(tmp_path, monkeypatch, number, matters):
    def refuse(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(number, "refused")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="refused") if matters else nullcontext():
        write_atomically(tmp_path / "status.json", "{}")
    assert read_json(tmp_path / "status.json") == {}


def test_a_killed_process_with_the_same_id_leaves_no_obstacle(tmp_path):
    """In a container every launcher may have the same process id."""
    for number in range(1000):
        (tmp_path / f".status.json.{os.getpid()}-{number}").touch()
    write_atomically(tmp_path / "status.json", "{}")
    assert read_json(tmp_path / "status.json") == {}


def test_an_atomic_write_leaves_the_old_file_when_it_fails(tmp_path, monkeypatch):
    path = tmp_path / "status.json"
    directory.write_json(path, {"state": "running"})

    def full(_handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, "{}")
    assert read_json(path) == {"state": "running"}
    assert list(tmp_path.iterdir()) == [path]


def test_checkpoints_and_attempts_are_counted_by_name(tmp_path):
    run = make(tmp_path)
    assert (run.checkpoint_steps(), run.last_attempt()) == ([], 0)
    for name in ("step-00000010", "step-00000009", ".writing-step-00000011", "damaged-step-1"):
        (run.checkpoints / name).mkdir()
    for number in (1, 2, 10):
        run.attempt_logs(number).mkdir()
    assert (run.checkpoint_steps(), run.last_attempt()) == ([9, 10], 10)


def test_a_numbered_name_is_no_longer_than_a_name_may_be(tmp_path):
    name = "ä" * 100
    (tmp_path / name).mkdir()
    free = free_name(tmp_path, name)
    assert len(free.encode()) <= 200 and free.endswith("-2")
    assert free_names(tmp_path, "n" * 198, 10) == "n" * 198
