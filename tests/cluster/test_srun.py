"""Ranks of processes that srun has started: `srun nanoscale train launcher=env`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nanoscale.runs import status
from nanoscale.runs.directory import RunDirectory
from tests.cluster.launches import FP32, SOURCE, TINY
from tests.cluster.machines import LIMIT_S
from tests.cluster.nodes import LOGIN
from tests.cluster.slurm import Slurm
from tests.support.rows import exhaustive


def srun(
    slurm: Slurm, folder: Path, options: list[str], *words: str
) -> subprocess.CompletedProcess[str]:
    train = [sys.executable, "-m", "nanoscale", "train", *TINY, "launcher=env", *words]
    words_of_tiny = [word for word in train if word != "launcher.device=cpu"]
    command = ["srun", *options, *words_of_tiny, "launcher.device=cpu"]
    environment = os.environ | slurm.environment | {"PYTHONPATH": str(SOURCE)}
    return slurm.call(LOGIN, command, cwd=folder, env=environment, limit_s=LIMIT_S)


@pytest.mark.parametrize(
    ("options", "hosts"), [(["-N2", "-n2"], ["s1", "s2"]), exhaustive(["-N1", "-n2"], None)]
)
def test_a_task_is_a_rank_and_the_same_command_continues(
    slurm: Slurm,
    tmp_path: Path,
    one_process: list[float],
    options: list[str],
    hosts: list[str] | None,
) -> None:
    done = srun(slurm, tmp_path, options, "train.steps=6")
    assert done.returncode == 0, done.stdout + done.stderr
    run = RunDirectory(tmp_path / "runs" / "r")
    plan = json.loads(run.launch.read_text())
    assert plan["world_size"] == 2
    assert hosts is None or [host["host"] for host in plan["hosts"]] == hosts
    done = srun(slurm, tmp_path, options, "train.steps=9")
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [json.loads(line)["loss"] for line in run.metrics.read_text().splitlines()]
    assert losses == pytest.approx(one_process[:9], rel=FP32)
    assert status.read(run).attempt == 2
    done = srun(slurm, tmp_path, options, "train.steps=9")
    assert done.returncode == 0 and "the run is complete" in done.stdout
    assert not list((tmp_path / "runs").glob(".nanoscale-*"))


def test_every_task_ends_with_the_code_of_an_error(slurm: Slurm, tmp_path: Path) -> None:
    done = srun(slurm, tmp_path, ["-N2", "-n2"], "train.seedx=4")
    assert done.returncode == 2
    assert done.stderr.count("train.seedx=4: unknown key") == 2, "each task shows its own error"
    done = srun(slurm, tmp_path, ["-N2", "-n2"], "parallel.dp=3")
    assert done.returncode == 2 and "parallel.dp" in done.stderr
