"""Calls of SLURM's commands; tests/cluster/test_submit.py uses a real one."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanoscale.common.errors import UserError
from nanoscale.launch.batch.slurm import SlurmSystem
from nanoscale.launch.batch.system import BatchError, query, without_job_variables
from nanoscale.runs.submission import Submission


def program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/bash\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def bin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder where programs are found."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def test_of_an_inherited_job_nothing_is_left_but_the_way_to_slurm() -> None:
    environment = {
        "SLURM_CONF": "a", "SLURM_JWT": "b", "SLURM_NTASKS": "9", "SBATCH_QOS": "x",
        "SQUEUE_STATES": "FAILED", "PATH": "/bin", "CUDA_VISIBLE_DEVICES": "1",
    }  # fmt: skip
    assert sorted(without_job_variables(environment)) == [
        "CUDA_VISIBLE_DEVICES", "PATH", "SLURM_CONF", "SLURM_JWT"
    ]  # fmt: skip


def test_no_sbatch_is_the_users_to_mend(bin_folder: Path) -> None:
    with pytest.raises(UserError) as caught:
        SlurmSystem().submit(bin_folder / "script")
    assert "login node" in str(caught.value)


def test_one_of_several_clusters_is_remembered_and_asked(bin_folder: Path) -> None:
    program(bin_folder, "sbatch", 'echo "sbatch: a note" >&2; echo "12;north"')
    job = SlurmSystem().submit(bin_folder / "script")
    assert (job.job, job.cluster) == ("12", "north")
    program(bin_folder, "scancel", f'echo "$*" > {bin_folder}/said')
    query(SlurmSystem().cancel(job))
    assert (bin_folder / "said").read_text() == "--clusters=north --state=PENDING 12\n"


def test_what_sbatch_says_is_the_error(bin_folder: Path) -> None:
    program(bin_folder, "sbatch", "printf 'sbatch: error: one\\nsbatch: error: two\\n' >&2; exit 1")
    with pytest.raises(BatchError, match="^one; two$"):
        SlurmSystem().submit(bin_folder / "script")


def test_a_wide_answer_is_read_whole(bin_folder: Path) -> None:
    nodes = ",".join(f"node{number}" for number in range(500))
    rows = [
        f"12_3  |RUNNING |None   |{nodes}|2026-11-21T20:13:06 |2 |",
        "12_4  |PENDING |Resources|  |N/A|0 |",
    ]
    program(bin_folder, "squeue", "\n".join(f"echo '{row}'" for row in rows))
    states = SlurmSystem().states([Submission("12", 3), Submission("12", 4), Submission("13")])
    assert sorted(states) == ["12_3", "12_4"]
    running, waiting = states["12_3"], states["12_4"]
    assert (running.nodes, running.start, running.reason) == (nodes, "2026-11-21 20:13:06", "")
    assert (running.restarts, running.waits, running.ended) == (2, False, False)
    assert (waiting.start, waiting.reason, waiting.waits) == (None, "Resources", True)


def test_a_job_that_slurm_has_forgotten_is_no_error(bin_folder: Path) -> None:
    program(
        bin_folder, "squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
    )
    assert SlurmSystem().states([Submission("12")]) == {}


def test_a_program_of_slurm_that_cannot_be_run_is_no_internal_error(bin_folder: Path) -> None:
    (bin_folder / "squeue").write_text("neither a script nor a program")
    (bin_folder / "squeue").chmod(0o755)
    with pytest.raises(BatchError, match="squeue cannot be run: Exec format error"):
        SlurmSystem().states([Submission("12")])


@pytest.mark.parametrize("text", [None, "echo 'squeue: error: Unable to contact' >&2; exit 1"])
def test_a_slurm_that_cannot_be_asked_is_told_from_that(bin_folder: Path, text: str | None) -> None:
    if text is not None:
        program(bin_folder, "squeue", text)
    with pytest.raises(BatchError):
        SlurmSystem().states([Submission("12")])
