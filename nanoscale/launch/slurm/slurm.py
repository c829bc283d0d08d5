"""The interface to SLURM: submitting, querying, signalling and cancelling a job."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from nanoscale.common.errors import UserError
from nanoscale.runs.submission import Submission

_KEPT_VARIABLES = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
"""Variables of SLURM's address and credentials; all its other variables belong to the job we may be in."""
_JOB_PREFIXES = ("SLURM_", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SCANCEL_", "SCONTROL_")

_TIMEOUT_S = 30.0
_COLUMNS = {
    "JobArrayID": 64,
    "State": 32,
    "Reason": 256,
    "NodeList": 8192,
    "StartTime": 32,
    "RestartCnt": 12,
}
"""The columns requested from squeue, with widths; by default it cuts a column at 20 characters."""

_WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
_ENDED = (
    "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL",
    "DEADLINE", "REVOKED", "LAUNCH_FAILED", "RECONFIG_FAIL",
)  # fmt: skip


class SlurmError(Exception):
    """An error of SLURM, or no answer; the message is SLURM's own."""


@dataclass(frozen=True)
class JobState:
    """The state of a job in SLURM."""

    job: str
    state: str
    """SLURM's own term: PENDING, RUNNING, COMPLETED, CANCELLED, …."""
    reason: str
    """The reason why it waits or ended; "" if there is none."""
    nodes: str
    """A node list such as `node[1-4]`; "" before it has any."""
    start: str | None
    """The local time of its start, or of the expected one."""
    restarts: int
    """The number of times that it was requeued."""

    @property
    def waits(self) -> bool:
        return self.state in _WAITING

    @property
    def ended(self) -> bool:
        return self.state in _ENDED


def submit(script: Path | str, tasks: Sequence[int] = (), at_once: int | None = None) -> Submission:
    """Submit a batch script to SLURM.

    Args:
        tasks: only these tasks of an array.
        at_once: how many of these tasks may run at the same time.

    Raises:
        UserError: there is no sbatch here.
        SlurmError: sbatch refused.
    """
    limit = "" if at_once is None else f"%{at_once}"
    try:
        array = [f"--array={','.join(map(str, tasks))}{limit}"] if tasks else []
        answer = _run(["sbatch", "--parsable", *array, str(script)], wait_s=None)
    except FileNotFoundError as error:
        message = "sbatch is not installed here; run `nanoscale submit` on a login node"
        raise UserError("slurm", message) from error
    job, _, cluster = answer.strip().splitlines()[-1].partition(";")
    return Submission(job, script=str(script), cluster=cluster or None)


def job_states(jobs: Iterable[Submission]) -> dict[str, JobState]:
    """Return the states of several jobs, by their numbers; jobs unknown to SLURM are left out.

    Raises:
        SlurmError: SLURM cannot be asked here, or does not answer.
    """
    states: dict[str, JobState] = {}
    by_cluster = sorted(jobs, key=lambda job: job.cluster or "")
    for cluster, cluster_jobs in groupby(by_cluster, key=lambda job: job.cluster):
        numbers = [str(job) for job in cluster_jobs]
        columns = ",".join(f"{name}:{width}|" for name, width in _COLUMNS.items())
        command = ["squeue", "--noheader", "--array", "--states=all", "--Format", columns]
        command += [*_cluster_option(cluster), "--jobs", ",".join(numbers)]
        rows = ([cell.strip() for cell in line.split("|")] for line in _query(command).splitlines())
        found = [_state(*row[: len(_COLUMNS)]) for row in rows if len(row) >= len(_COLUMNS)]
        states |= {state.job: state for state in found if state.job in numbers}
    return states


def cancel(job: Submission, *, only_waiting: bool = False) -> None:
    """Cancel a job in the queue, or end it.

    Args:
        only_waiting: do nothing if it has begun meanwhile, unless it belongs to an array.

    Raises:
        SlurmError: SLURM refused.
    """
    # With a state, scancel cancels all waiting tasks of an array, not only the named one.
    waiting = ["--state=PENDING"] if only_waiting and job.task is None else []
    _query(["scancel", *_cluster_option(job.cluster), *waiting, str(job)])


def signal_batch(job: Submission, name: str) -> None:
    """Send a signal to the batch script of a running job, and to none of its other processes.

    Raises:
        SlurmError: SLURM refused.
    """
    _query(["scancel", *_cluster_option(job.cluster), "--batch", f"--signal={name}", str(job)])


def host_names(nodes: str) -> list[str]:
    """Expand a node list such as `node[1-4]`.

    Raises:
        SlurmError: SLURM does not answer.
    """
    if "[" not in nodes:
        return nodes.split(",")
    return _query(["scontrol", "show", "hostnames", nodes]).split()


def _cluster_option(cluster: str | None) -> list[str]:
    return [] if cluster is None else [f"--clusters={cluster}"]


def _state(job: str, state: str, reason: str, nodes: str, start: str, restarts: str) -> JobState:
    return JobState(
        job=job,
        state=state,
        reason="" if reason == "None" else reason,
        nodes=nodes,
        start=start.replace("T", " ") if start[:1].isdecimal() else None,
        restarts=int(restarts) if restarts.isdecimal() else 0,
    )


def _query(command: Sequence[str]) -> str:
    try:
        return _run(command, _TIMEOUT_S)
    except FileNotFoundError as error:
        raise SlurmError(f"there is no {command[0]} here") from error
    except OSError as error:
        raise SlurmError(f"{command[0]} cannot be run: {error.strerror}") from error


def _run(command: Sequence[str], wait_s: float | None) -> str:
    """Return the output of a SLURM command; empty if it only reports that it knows no such job."""
    try:
        result = subprocess.run(
            command,
            env=without_job_variables(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=wait_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SlurmError(f"{command[0]} did not answer within {wait_s:g} s") from error
    if result.returncode == 0 or (command[0] == "squeue" and "Invalid job id" in result.stderr):
        return result.stdout
    lines = [line.removeprefix(f"{command[0]}: ") for line in result.stderr.strip().splitlines()]
    lines = [line.removeprefix("error: ") for line in lines]
    raise SlurmError("; ".join(lines) or f"{command[0]} ended with {result.returncode}")


def without_job_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without a SLURM job's variables, which would become options of the next job."""
    return {
        name: value
        for name, value in environment.items()
        if name in _KEPT_VARIABLES or not name.startswith(_JOB_PREFIXES)
    }
