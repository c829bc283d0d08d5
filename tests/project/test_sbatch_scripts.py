"""The wrappers for those who call sbatch themselves: a real bash, and a stand-in for nanoscale."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from nanoscale.launch.batch.slurm import LISTEN, REQUEUE
from nanoscale.launch.submission.batch_job import FOLLOW
from tests.support.batch import STAND_IN, Batch

SCRIPTS = Path(__file__).parents[2] / "scripts" / "sbatch"
BOTH = pytest.mark.parametrize("name", ["train", "array"])
ARRAY = {"SLURM_ARRAY_JOB_ID": "11", "SLURM_ARRAY_TASK_ID": "1"}


@pytest.fixture
def start(tmp_path: Path) -> Any:
    started: list[Batch] = []

    def begin(name: str, *words: str, **environment: str) -> Batch:
        (tmp_path / "job" / "bin").mkdir(parents=True, exist_ok=True)
        (tmp_path / "job" / "bin" / "nanoscale").symlink_to(STAND_IN)
        script = (SCRIPTS / f"{name}.sbatch").read_text()
        started.append(Batch(tmp_path / "job", script, *words, **environment))
        return started[-1]

    yield begin
    for one in started:
        one.process.kill()
        one.process.wait()


@BOTH
def test_they_listen_and_queue_again_as_ours_do(name: str) -> None:
    text = (SCRIPTS / f"{name}.sbatch").read_text()
    assert all(part in text for part in (LISTEN, FOLLOW, REQUEUE))


def test_the_words_are_those_of_train(start: Any) -> None:
    job = start("train", "recipe=debug", "data.path='$(touch x) y'", STAND_IN_CODE="4")
    assert job.end() == 4
    assert job.wait_called()["argv"] == [
        "train", "launcher=slurm", "recipe=debug", "data.path='$(touch x) y'",
        "run.root=runs", "run.name=job-12",
    ]  # fmt: skip
    assert not (job.folder / "x").exists()


def test_a_task_of_an_array_takes_its_line(start: Any, tmp_path: Path) -> None:
    lines = tmp_path / "the lines"
    lines.write_text("train.seed=1\ntrain.seed=2 optimizer.lr=$(touch x)\n")
    job = start("array", str(lines), "recipe=debug", STAND_IN_CODE="0", **ARRAY)
    assert job.end() == 0
    assert job.wait_called()["argv"] == [
        "train", "launcher=slurm", "recipe=debug", "train.seed=2", "optimizer.lr=$(touch", "x)",
        "run.root=runs", "run.name=job-11_1",
    ]  # fmt: skip


@BOTH
def test_a_job_that_was_queued_again_goes_on_with_its_run(
    start: Any, tmp_path: Path, name: str
) -> None:
    run = "job-12" if name == "train" else "job-11_1"
    there = tmp_path / "job" / "runs" / run
    there.mkdir(parents=True)
    (there / "config.yaml").touch()
    (tmp_path / "lines").write_text("a=1\nb=2\n")
    words = [str(tmp_path / "lines")] if name == "array" else ["recipe=debug"]
    job = start(name, *words, SLURM_RESTART_COUNT="1", **ARRAY)
    assert job.wait_called()["argv"] == ["resume", f"runs/{run}"]
    job.process.send_signal(signal.SIGUSR1)
    assert job.end() == 75
    assert job.requeued
