"""SLURM: its commands, and its part of a batch script."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from nanoscale.common.errors import UserError, Violation
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.values.forms import elastic
from nanoscale.launch.batch.system import SHELL, TRAPS, BatchSystem, JobState, query
from nanoscale.runs.submission import Submission

_COLUMNS = {
    "JobArrayID": 64,
    "State": 32,
    "Reason": 256,
    "NodeList": 8192,
    "StartTime": 32,
    "RestartCnt": 12,
}
"""The columns requested from squeue, with widths; by default it cuts a column at 20 characters."""

_PLAIN = re.compile(r"[\w./:,=@+%^*\[\]-]+", re.ASCII)
"""Values that sbatch reads unchanged."""

_INSTEAD_OF_GPUS = ("gpus", "gpus-per-node", "gpus-per-task", "gres")

LISTEN = f"""\
# SLURM sends USR1 before the time limit; `nanoscale runs stop` and scancel send TERM.
# The launcher saves and stops on either, and ends with code 75, or 130 after `nanoscale runs stop`.
export NANOSCALE_BATCH=$SLURM_JOB_ID # tells runs that this job forwards signals
{TRAPS}"""

REQUEUE = (SHELL / "requeue.sh").read_text("utf-8")

_SETTINGS = ("partition", "account", "qos", "time", "constraint")
"""Options of sbatch with the name of their key."""


class SlurmSystem(BatchSystem):
    """SLURM, whose srun starts the agents."""

    name = "slurm"
    title = "SLURM"
    commands = ("sbatch --parsable", "scancel", "scancel")
    directive = "#SBATCH "
    interactive = "put `salloc --nodes=2` before the command"

    def arguments(self, script: str, tasks: Sequence[int], at_once: int | None = None) -> list[str]:
        limit = "" if at_once is None else f"%{at_once}"
        return [*([f"--array={','.join(map(str, tasks))}{limit}"] if tasks else []), script]

    def states(self, jobs: Iterable[Submission]) -> dict[str, JobState]:
        states: dict[str, JobState] = {}
        by_cluster = sorted(jobs, key=lambda job: job.cluster or "")
        for cluster, cluster_jobs in groupby(by_cluster, key=lambda job: job.cluster):
            numbers = [str(job) for job in cluster_jobs]
            columns = ",".join(f"{name}:{width}|" for name, width in _COLUMNS.items())
            command = ["squeue", "--noheader", "--array", "--states=all", "--Format", columns]
            command += [*_cluster_option(cluster), "--jobs", ",".join(numbers)]
            lines = query(command, "Invalid job id").splitlines()
            rows = ([cell.strip() for cell in line.split("|")] for line in lines)
            found = [_state(*row[: len(_COLUMNS)]) for row in rows if len(row) >= len(_COLUMNS)]
            states |= {state.job: state for state in found if state.job in numbers}
        return states

    def cancel(self, job: Submission) -> list[str]:
        # With a state, scancel cancels all waiting tasks of an array, not only the named one.
        waiting = ["--state=PENDING"] if job.task is None else []
        return ["scancel", *_cluster_option(job.cluster), *waiting, str(job)]

    def signal(self, job: Submission, name: str) -> list[str]:
        batch = ["--batch", f"--signal={name}"]
        return ["scancel", *_cluster_option(job.cluster), *batch, str(job)]

    def hosts(self, env: Mapping[str, str]) -> list[str] | None:
        nodes = env.get("SLURM_JOB_NODELIST")
        return None if nodes is None else host_names(nodes)

    def listening(self, config: ResolvedConfig, logs: Path) -> str:
        return LISTEN

    def requeueing(self, config: ResolvedConfig, python: str, run: str) -> str:
        return f"max_requeues={config.launcher.slurm.max_requeues}\n{REQUEUE}"

    def options(
        self, config: ResolvedConfig, name: str, logs: Path, array: str | None = None
    ) -> list[str]:
        """Return the options of a script; `array` has the tasks of an array, whose folder is `logs`."""
        output = f"{_pattern(logs)}/slurm-{'%j' if array is None else '%A_%a'}.out"
        launcher, settings = config.launcher, config.launcher.slurm
        assert isinstance(launcher.devices, int)
        directives = [_split(directive) for directive in settings.directives]
        has_gpus = any(option in _INSTEAD_OF_GPUS for option, _ in directives)
        has_memory = any(option.startswith("mem") for option, _ in directives)
        gpus = str(launcher.devices) if launcher.device == "cuda" else None
        threads = launcher.threads
        is_shared = isinstance(threads, int) and not settings.exclusive
        options: dict[str, str | bool | None] = {
            "job-name": name,
            "output": output,
            "open-mode": "append",
            "nodes": str(launcher.nodes or 1).replace(":", "-"),
            "ntasks-per-node": "1",
            "gpus-per-node": None if has_gpus else settings.gpus or gpus,
            "no-kill": elastic(launcher.nodes),  # the job continues with the remaining nodes
            "exclusive": settings.exclusive,
            # All of a node, not the site's default.
            "mem": "0" if settings.exclusive and not has_memory else None,
            "cpus-per-task": str(launcher.devices * threads) if is_shared else None,
            **{it: getattr(settings, it) for it in _SETTINGS},
            "requeue": True,
            "signal": f"B:USR1@{before_s}" if (before_s := settings.signal_before_s) else None,
        }
        given = [it for it in options.items() if it[1] not in (None, False)] + directives
        given += [] if array is None else [("array", array)]
        return [_directive(*it) for it in given]


def host_names(nodes: str) -> list[str]:
    """Expand a node list such as `node[1-4]`.

    Raises:
        BatchError: SLURM does not answer.
    """
    if "[" not in nodes:
        return nodes.split(",")
    return query(["scontrol", "show", "hostnames", nodes]).split()


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


def _split(directive: str) -> tuple[str, str | bool | None]:
    name, equals, value = directive.removeprefix("--").partition("=")
    return name, value if equals else None


def _directive(option: str, value: str | bool | None) -> str:
    """Format an option for sbatch: no shell, but quotes, backslashes within them, and comments."""
    if not isinstance(value, str):
        return f"--{option}"
    assert value.isprintable(), f"the rules let a control character pass in --{option}"
    if _PLAIN.fullmatch(value):
        return f"--{option}={value}"
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'--{option}="{escaped}"'


def _pattern(folder: Path) -> str:
    """Escape a folder for a file name pattern of SLURM, in which % begins a placeholder."""
    text = str(folder)
    if text.isprintable() and "\\" not in text:
        return text.replace("%", "%%")
    message = (
        "holds what jobs print; SLURM cannot write to a path with a backslash or control character"
    )
    violation = Violation("run.root", os.fspath(folder), "", message, ("run.root=/…",))
    raise UserError("run", "SLURM cannot write there", [violation])
