"""`nanoscale submit` to a real SLURM, and following the run from its directory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanoscale.runs import submission
from nanoscale.runs.directory import RunDirectory
from tests.cluster.machines import wait_until
from tests.cluster.slurm import LOGIN, Slurm

SOURCE = Path(__file__).parents[2]
LIMIT_S = 90
WORDS = ("recipe=debug", "model.layers=2", "launcher.device=cpu", "launcher.threads=1")


class User:
    """Somebody at the login node, in a folder of theirs."""

    def __init__(self, slurm: Slurm, folder: Path) -> None:
        self.slurm = slurm
        self.folder = folder

    @property
    def _environment(self) -> dict[str, str]:
        return os.environ | self.slurm.environment | {"PYTHONPATH": str(SOURCE)}

    def types(self, *words: str, code: int = 0) -> str:
        """Type `nanoscale …` and wait for its end; what it printed."""
        command = [sys.executable, "-m", "nanoscale", *words]
        done = self.slurm.call(
            LOGIN, command, cwd=self.folder, env=self._environment, limit_s=LIMIT_S
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def begins(self, *words: str) -> subprocess.Popen[str]:
        """Type it and do not wait."""
        command = [sys.executable, "-m", "nanoscale", *words]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return self.slurm.run_in(
            LOGIN, command, cwd=self.folder, env=self._environment, text=True, **pipes
        )

    def submits(self, name: str, *words: str) -> tuple[RunDirectory, int]:
        """Submit a run; its directory and job."""
        self.types("submit", *WORDS, f"run.name={name}", *words)
        run = RunDirectory(self.folder / "runs" / name)
        job = submission.read(run)
        assert job is not None
        return run, int(job.job)

    def says_of(self, name: str) -> str:
        """The state of a run as `runs ls` tells it."""
        rows = json.loads(self.types("runs", "ls", "--json"))
        (said,) = [row["said"] for row in rows if row["name"] == name]
        return str(said)


@pytest.fixture
def user(slurm: Slurm, tmp_path: Path) -> Iterator[User]:
    yield User(slurm, tmp_path)


def wait_step(run: RunDirectory, step: int) -> None:
    def there() -> bool:
        lines = run.metrics.read_text().splitlines() if run.metrics.exists() else []
        return len(lines) >= step

    wait_until(there, f"step {step} of {run.name}", LIMIT_S)


def steps(run: RunDirectory) -> list[int]:
    return [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()]


def test_submitted_waited_for_watched_and_completed(user: User) -> None:
    run, job = user.submits("one", "launcher.nodes=2", 'launcher.slurm.directives=["--hold"]')
    assert user.says_of("one") == f"queued (job {job})"
    shown = user.types("runs", "show", "one")
    assert f"job {job}: PENDING (JobHeldUser), queued since" in shown
    watch = user.begins("runs", "watch", "one")
    assert watch.stdout is not None
    assert "PENDING" in watch.stdout.readline()
    user.slurm.command("scontrol", "release", job)
    printed, _ = watch.communicate(timeout=LIMIT_S)
    assert watch.returncode == 0, printed
    assert "watching 2 ranks on s1, s2" in printed and "completed after 20 steps" in printed
    assert steps(run) == list(range(1, 21))
    user.slurm.wait_state(job, "COMPLETED")
    assert f"job {job}: COMPLETED, on s[1-2] since" in user.types("runs", "show", "one")
    assert "completed after 20 steps" in user.types("runs", "logs", "one", "--batch")
