"""SLURM signals the processes of a job as the launcher expects."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.cluster.machines import wait_until
from tests.cluster.slurm import LOGIN, Slurm

pytestmark = pytest.mark.exhaustive
"""They test SLURM, and not nanoscale."""

# Each task records its signals; after TERM it saves, and ends.
TASK = """#!/bin/bash
say() { echo "$1 $2" >> "$HEARD"; }
name="${SLURMD_NODENAME:-login}.${SLURM_RESTART_COUNT:-0}"
for number in USR1 USR2 INT; do trap "say $name $number" $number; done
trap "say $name TERM; exit ${TASK_CODE:-0}" TERM
say "$name" start
while :; do sleep 0.05; done
"""
# The batch script receives signals while its step runs, since the step runs in the background.
BATCH = """#!/bin/bash
say() { echo "batch.${SLURM_RESTART_COUNT:-0} $1" >> "$HEARD"; }
for number in USR1 TERM; do trap "say $number" $number; done
say start
[ -n "$SLURM_RESTART_COUNT" ] && exit 0
srun --kill-on-bad-exit=1 "$TASK" &
until wait; do :; done
say "step ended"
eval "$AFTERWARDS"
"""


@pytest.fixture
def job(slurm, tmp_path):
    """Submit a job of a batch script with a step, whose processes record their signals."""
    return Job(slurm, tmp_path)


class Job:
    def __init__(self, slurm: Slurm, folder: Path) -> None:
        self.slurm = slurm
        self.folder = folder
        self.number = 0
        for name, text in (("task", TASK), ("batch", BATCH)):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)

    def submit(self, *options: str, afterwards: str = "exit 0") -> int:
        self.heard_in = self.folder / "heard"
        self.heard_in.touch()
        environment = os.environ | {
            "HEARD": str(self.heard_in),
            "TASK": str(self.folder / "task"),
            "AFTERWARDS": afterwards,
        }
        output = f"--output={self.folder}/output"
        words = ["--open-mode=append", output, *options, self.folder / "batch"]
        self.number = self.slurm.sbatch(*words, env=environment)
        return self.number

    def heard(self) -> list[str]:
        return self.heard_in.read_text().splitlines()

    def wait_heard(self, *lines: str) -> None:
        wait_until(lambda: set(lines) <= set(self.heard()), f"{lines} in {self.heard_in}", 20.0)


def test_nothing_of_a_cancelled_job_is_left(slurm, job):
    job.submit("-N2", afterwards="sleep 1000")
    job.wait_heard("s1.0 start", "s2.0 start")
    assert slurm.processes("s1") and slurm.processes("s2")
    assert slurm.processes(LOGIN) == {}
    slurm.cancel(job.number)
    slurm.wait_state(job.number, "CANCELLED")
    assert {"batch.0 TERM", "s1.0 TERM", "s2.0 TERM"} <= set(job.heard())
    wait_until(lambda: slurm.processes() == {}, "end of its processes")


def test_signals_go_to_steps_or_to_the_batch_script(slurm, job):
    job.submit("-N2")
    job.wait_heard("s1.0 start", "s2.0 start")
    slurm.command("scancel", "--signal=USR1", "--batch", job.number)
    job.wait_heard("batch.0 USR1")
    slurm.command("scancel", "--signal=USR2", job.number)
    job.wait_heard("s1.0 USR2", "s2.0 USR2")
    assert not {"batch.0 USR2", "s1.0 USR1", "s2.0 USR1"} & set(job.heard())


def test_a_preempted_job_that_ends_in_time_is_not_requeued(slurm, job):
    job.submit("-N2", "--exclusive", "--requeue", afterwards="exit 75")
    job.wait_heard("s1.0 start", "s2.0 start")
    urgent = slurm.sbatch("-N2", "--exclusive", "-phigh", "--output=/dev/null", "--wrap", "true")
    slurm.wait_state(urgent, "COMPLETED")
    last = slurm.show(job.number)
    assert (last["JobState"], last["ExitCode"], last["Restarts"]) == ("FAILED", "75:0", "0")


def test_a_killed_srun_takes_its_tasks_along(slurm, job):
    """Its child notices and kills the step; with both killed at once the tasks would live on."""
    job.submit("-N2", afterwards="sleep 1000")
    job.wait_heard("s1.0 start", "s2.0 start")
    sruns = {pid for pid, line in slurm.processes("s1").items() if line.startswith("srun ")}
    (parent,) = [pid for pid in sruns if psutil.Process(pid).ppid() not in sruns]
    os.kill(parent, signal.SIGKILL)
    wait_until(lambda: slurm.processes("s2") == {}, "end of the tasks")
    assert "s2.0 TERM" not in job.heard()


def test_the_command_of_salloc_is_not_told_that_its_nodes_are_gone(slurm, tmp_path):
    command = ["salloc", "-N2", "sh", "-c", "echo here; trap 'echo told' TERM HUP; sleep 1000"]
    with (tmp_path / "said").open("w") as said:
        salloc = slurm.run_in(
            LOGIN, command, env=os.environ | slurm.environment, stdout=said, stderr=said
        )
    wait_until(lambda: "here" in (tmp_path / "said").read_text(), "allocation")
    job = int(slurm.command("squeue", "--noheader", "--format=%i"))
    slurm.cancel(job)
    wait_until(lambda: "revoked" in (tmp_path / "said").read_text(), "revocation")
    assert "told" not in (tmp_path / "said").read_text()
    assert salloc.poll() is None
