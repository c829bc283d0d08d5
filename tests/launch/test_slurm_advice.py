"""Commands of SLURM that errors advise: SLURM's own programs accept their options.

tests/cluster/test_submit.py types some of them where a SLURM runs.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from nanoscale.cli.main import run as nanoscale
from nanoscale.common.devices import Devices
from nanoscale.config.composing.frozen import dump, load
from nanoscale.config.rules import check
from nanoscale.launch.submission.batch_job import _BLAMED
from nanoscale.runs import status, submission
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.submission import Submission
from nanoscale.runs.trust import executed, sign
from tests.support.recipes import changed
from tests.support.runs import create_run

PROGRAMS = ("sinfo", "scancel", "salloc", "sbatch")
CONF = """ClusterName=tests
SlurmctldHost=localhost
AuthType=auth/munge
NodeName=s1 CPUs=4
PartitionName=low Nodes=s1 Default=YES
"""
LIMIT_S = 60
JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "s1,s2", "SLURM_JOB_NUM_NODES": "2"}
TRAIN = ["train", "recipe=debug", "launcher.device=cpu", "--dry-run"]

needs_slurm = pytest.mark.skipif(
    any(shutil.which(program) is None for program in PROGRAMS),
    reason="SLURM's programs are not installed: apt-get install slurm-client",
)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))


def is_read(command: str) -> bool:
    """True if the program knows every option before `--usage`, at which it stops; it asks no SLURM."""
    Path("slurm.conf").write_text(CONF)
    done = subprocess.run(
        [*shlex.split(command), "--usage"],
        env=os.environ | {"SLURM_CONF": str(Path("slurm.conf").resolve())},
        capture_output=True,
        timeout=LIMIT_S,
    )
    return done.returncode == 0


def advice(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert nanoscale([*words, "--json"] if "--json" not in words else list(words)) == 2
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["error"]["violations"]
    return found


@needs_slurm
@pytest.mark.parametrize("command", sorted({command for *_, command in _BLAMED}))
def test_the_command_that_tells_what_slurm_offers_is_read(command: str) -> None:
    program, *options = shlex.split(command)
    assert program in (*PROGRAMS, "sacctmgr")
    if program == "sacctmgr":  # it reads nothing without a database
        assert options == ["show", "associations", "user=$USER"]
        return
    assert is_read(command) and not is_read(f"{program} --nonsense")
    columns = [option.partition("=")[2] for option in options if option.startswith("--Format=")]
    known = subprocess.run(["sinfo", "--helpformat2"], capture_output=True, text=True).stdout
    for name in ",".join(columns).split(",") if columns and known else []:
        assert name.lower() in known.lower().split()


def run_of_a_job(job: Submission, state: str) -> RunDirectory:
    """Create an unsigned run folder, whose job SLURM seems to know; `called` has scancel's arguments."""
    composed = changed()
    run = create_run(Path("runs"), "x")
    run.config.write_text(dump(check(composed, Devices("cpu", 2)), composed.config))
    status.write(run, status.prepared())
    submission.write(run, job)
    programs = Path("bin")
    programs.mkdir()
    answers = {
        "squeue": f"test -e called || echo '{job}|{state}|None|node|N/A|0|'",
        "scancel": 'echo "scancel $*" > called',
    }
    for name, answer in answers.items():
        (programs / name).write_text(f"#!/bin/sh\n{answer}\n")
        (programs / name).chmod(0o755)
    return run


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [None, "north"])
@pytest.mark.parametrize("state", ["RUNNING", "PENDING"])
def test_the_scancel_for_somebody_elses_run_does_what_stop_does(
    state: str,
    cluster: str | None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = run_of_a_job(Submission("12", task=3, cluster=cluster), state)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{Path('bin').resolve()}:{os.environ['PATH']}")
        assert nanoscale(["runs", "stop", "x"]) == 2
        (command,) = re.findall(r"type instead: (scancel .*)", capsys.readouterr().err)
        assert not Path("called").exists()
        sign(run.path, executed(load(run.config)))
        assert nanoscale(["runs", "stop", "x"]) == 0
    assert Path("called").read_text() == f"{command}\n"


@needs_slurm
@pytest.mark.parametrize("state", ["RUNNING", "PENDING"])
def test_scancel_reads_it(
    state: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_of_a_job(Submission("12", cluster="north"), state)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{Path('bin').resolve()}:{os.environ['PATH']}")
        assert nanoscale(["runs", "stop", "x"]) == 2
    (command,) = re.findall(r"type instead: (scancel .*)", capsys.readouterr().err)
    assert is_read(command.replace("--clusters=north ", ""))  # of clusters, it asks a database
    assert not is_read("scancel --signal=TRM 12")


def test_a_job_of_slurm_is_asked_for_as_advised(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`salloc` makes a job for a command, `nanoscale submit` in the place of `nanoscale train` queues one."""
    (wrong,) = advice(capsys, *TRAIN, "launcher=slurm")
    salloc, submit, train = wrong["remedy"].split("`")[1::2]
    if shutil.which("salloc") is not None:
        assert is_read(salloc)
    nodes = re.findall("--nodes=([0-9]+)", salloc)
    assert (nodes, submit, train) == (["2"], "nanoscale submit", "nanoscale train")
    assert nanoscale(["submit", *TRAIN[1:], "launcher=slurm"]) == 0
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    assert nanoscale([*TRAIN, "launcher=slurm"]) == 0


def test_a_job_with_too_few_nodes_takes_those_that_it_has(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    (wrong,) = advice(capsys, *TRAIN, "launcher=slurm", "launcher.nodes=3")
    (word,) = wrong["suggestions"]
    assert nanoscale([*TRAIN, "launcher=slurm", word]) == 0


@pytest.mark.parametrize(
    ("inherited", "program"),
    [
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"} | JOB, "srun"),
        ({"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "4"}, "torchrun"),
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}, "mpirun"),
    ],
)
def test_the_same_command_without_the_program_that_copies_it_starts_it_once(
    inherited: dict[str, str],
    program: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Within the job, the command has the variables of the job alone; torchrun's and mpirun's are gone."""
    with monkeypatch.context() as patch:
        for name, value in inherited.items():
            patch.setenv(name, value)
        (wrong,) = advice(capsys, *TRAIN)
    assert f"type the same command without {program}" in wrong["remedy"]
    for name in JOB.keys() & inherited.keys():
        monkeypatch.setenv(name, JOB[name])
    added = re.findall(r"with (launcher=slurm), in a job of salloc or sbatch", wrong["remedy"])
    assert bool(added) == (program == "srun")
    assert nanoscale([*TRAIN, *added]) == 0
