"""`nanoscale runs rm` and `nanoscale checkpoints prune`: what is deleted, refused, left by a crash."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from nanoscale.checkpoint import store
from nanoscale.cli.inspect import run_changes
from nanoscale.cli.main import run as nanoscale
from nanoscale.common.devices import Devices
from nanoscale.config.composing.frozen import dump
from nanoscale.config.rules import check
from nanoscale.launch.batch.system import BatchError, JobState
from nanoscale.launch.batch.systems import SYSTEMS
from nanoscale.runs import fence, status, submission
from nanoscale.runs.changes import size_of
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.lock import RunLock
from nanoscale.runs.submission import Submission
from tests.cli import Capsys
from tests.support.recipes import changed
from tests.support.runs import create_run

LOSSES = {2: 3.0, 4: 1.0, 6: None, 8: 2.0, 10: 4.0}
"""The steps of checkpoints, and their evaluation losses."""
BAD = [
    ["runs", "rm"],
    ["runs", "rm", "first", "nothing", "--yes"],
    ["runs", "rm", "first"],
    ["checkpoints", "prune", "nothing", "--yes"],
    ["checkpoints", "prune", "first", "--keep-last", "1"],
    ["checkpoints", "prune", "first", "--yes", "--keep-last", "0"],
    ["checkpoints", "prune", "first", "--yes", "--keep-every", "x"],
    ["checkpoints", "prune", "first", "--yes", "--keep-best", "-1"],
]


def make(name: str) -> RunDirectory:
    run = create_run(Path("runs"), name)
    run.config.write_text(dump(check(changed(), Devices("cpu", 2))))
    status.write(run, status.Status("prepared", 0, 1.0).starting(1).ending("completed", 0))
    return run


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.chdir(tmp_path)
    run = make("first")
    fence.begin(run, 1)
    for step, loss in LOSSES.items():
        staging = store.staging_path(run.workspace(1), step)
        staging.mkdir()
        (staging / "a.distcp").write_bytes(b"x" * 1000)
        manifest = {"step": step, "tokens": step} | ({"eval_loss": loss} if loss else {})
        store.publish(staging, manifest, store.sum_files(staging.iterdir()))
    fence.end(run)
    return run


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize("words", BAD, ids=" ".join)
def test_a_bad_line_deletes_nothing(words: list[str], run: RunDirectory, capsys: Capsys) -> None:
    before = files(Path())
    assert nanoscale(words) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("error:") == 1 and "Traceback" not in err
    assert files(Path()) == before


def test_runs_are_deleted_with_all_files(run: RunDirectory, capsys: Capsys) -> None:
    make("second")
    size = size_of(run.path)
    assert size == sum(map(len, files(run.path).values()))
    assert nanoscale(["runs", "rm", "first", "runs/first", "--yes", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == {"deleted": [{"path": str(run.path), "bytes": size}], "bytes": size}
    assert [path.name for path in Path("runs").iterdir()] == ["second"]


def test_the_advice_without_a_terminal_is_accepted(run: RunDirectory, capsys: Capsys) -> None:
    for words in (["checkpoints", "prune", "first", "--keep-last", "1"], ["runs", "rm", "first"]):
        assert nanoscale([*words, "--json"]) == 2
        found = json.loads(capsys.readouterr().out)["error"]["violations"]
        (advice,) = [text for violation in found for text in violation["suggestions"]]
        assert nanoscale([*words, advice]) == 0
        capsys.readouterr()
    assert not run.path.exists()


@pytest.mark.parametrize(("answer", "remains"), [(False, True), (True, False)])
def test_the_question(
    answer: bool, remains: bool, run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(run_changes, "can_ask", lambda: True)
    monkeypatch.setattr(run_changes, "is_confirmed", lambda text: asked.append(text) or answer)
    assert nanoscale(["runs", "rm", "first"]) == 0
    assert len(asked) == 1 and "KiB would be deleted" in asked[0]
    assert re.search(r"KiB +first", capsys.readouterr().err)
    assert run.path.exists() == remains


@pytest.mark.parametrize("words", [["runs", "rm"], ["checkpoints", "prune", "--keep-last=1"]])
def test_an_active_run_is_refused(
    words: list[str], run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    words = [*words, "first", "--yes"]
    with RunLock(run):
        before = files(run.path)
        assert nanoscale(words) == 2
        assert files(run.path) == before
    assert "already running" in capsys.readouterr().err
    submission.write(run, Submission("7"))
    before = files(run.path)
    states: dict[str, JobState] = {"7": JobState("7", "PENDING", "Priority", "", None, 0)}
    monkeypatch.setattr(SYSTEMS["slurm"], "states", lambda jobs: states)
    assert nanoscale(words) == 2
    assert "nanoscale runs stop first" in capsys.readouterr().err
    status.write(run, status.prepared())

    def no_answer(jobs: object) -> dict[str, JobState]:
        raise BatchError("no route to the controller")

    monkeypatch.setattr(SYSTEMS["slurm"], "states", no_answer)
    assert nanoscale(words) == 2
    assert "no route to the controller" in capsys.readouterr().err
    assert files(run.path).keys() == before.keys()
    states.clear()
    monkeypatch.setattr(SYSTEMS["slurm"], "states", lambda jobs: states)
    assert nanoscale(words) == 0


def test_what_an_interrupted_deletion_leaves_is_no_run(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    make("second")

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", killed)
        assert nanoscale(["runs", "rm", "first", "--yes"]) == 130
    (remains,) = Path("runs").glob(".*")
    assert (remains / "checkpoints").is_dir()
    assert nanoscale(["runs", "show", str(remains)]) == 2
    assert nanoscale(["runs", "ls", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == ["second"]
    assert nanoscale(["runs", "rm", "second", "--yes"]) == 0
    assert list(Path("runs").iterdir()) == []


def test_the_target_of_a_link_is_deleted_by_its_own_name(run: RunDirectory, capsys: Capsys) -> None:
    """Somebody else may have planted the link, so that --yes deletes nothing outside of the folder of runs."""
    shutil.move(run.path, "elsewhere")
    run.path.symlink_to(Path("elsewhere").absolute())
    assert nanoscale(["runs", "rm", "first", "--yes"]) == 2
    advice = capsys.readouterr().err.partition("type instead: ")[2].strip()
    assert Path("elsewhere").is_dir()
    assert nanoscale(shlex.split(advice)[1:]) == 0
    assert not Path("elsewhere").exists()


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ([], [8, 10]),  # checkpoint.keep_last=2
        (["--keep-last", "1"], [10]),
        (["--keep-last", "1", "--keep-every", "4"], [4, 8, 10]),
        (["--keep-last", "1", "--keep-best", "2"], [4, 8, 10]),
        (["--keep-last", "9"], [*LOSSES]),
    ],
)
def test_prune(options: list[str], kept: list[int], run: RunDirectory, capsys: Capsys) -> None:
    assert nanoscale(["checkpoints", "prune", "first", *options, "--yes", "--json"]) == 0
    freed = json.loads(capsys.readouterr().out)
    assert run.checkpoint_steps() == kept
    assert [Path(row["path"]).name for row in freed["deleted"]] == [
        f"step-{step:08d}" for step in LOSSES if step not in kept
    ]
    assert freed["bytes"] > 1000 * len(freed["deleted"]) or not freed["deleted"]
    assert run.latest.resolve().name == "step-00000010"
    assert not list(run.checkpoints.glob(".*"))


def test_damaged_checkpoints_do_not_count(run: RunDirectory) -> None:
    (run.checkpoint(10) / "a.distcp").write_bytes(b"")
    (run.checkpoint(4) / "manifest.json").write_text("{}")
    assert nanoscale(["checkpoints", "prune", "first", "--keep-last", "1", "--yes"]) == 0
    assert run.checkpoint_steps() == [4, 8, 10]


def test_an_interrupted_prune_leaves_whole_checkpoints(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", killed)
        assert nanoscale(["checkpoints", "prune", "first", "--yes"]) == 130
    assert run.checkpoint_steps() == [4, 6, 8, 10]
    assert not any(store.find_damage(it.path) for it in store.list_checkpoints(run.checkpoints))
    assert nanoscale(["checkpoints", "prune", "first", "--yes"]) == 0
    assert run.checkpoint_steps() == [8, 10]
    assert not list(run.checkpoints.glob(".*"))
