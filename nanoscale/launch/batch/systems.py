"""The table of batch systems, and the two shortest of them: PBS and LSF.

Sources: the manuals of OpenPBS (qsub, qstat, qsig) and of IBM Spectrum LSF 10.1 (bsub, bjobs, bkill).
"""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.rules.launcher import time_limit_s
from nanoscale.config.values.forms import node_range
from nanoscale.launch.batch.slurm import SlurmSystem
from nanoscale.launch.batch.system import BatchSystem, JobState, query
from nanoscale.runs.submission import Submission


class Pbs(BatchSystem):
    """OpenPBS, PBS Professional and Torque."""

    name = "pbs"
    title = "PBS"
    commands = ("qsub", "qdel", "qsig -s")
    directive = "#PBS "
    job = "$PBS_JOBID"
    interactive = "type the command in the shell of `qsub -I -l select=2`"
    _STATES = dict.fromkeys("QHWT", "PENDING") | dict.fromkeys("CFX", "COMPLETED")

    def states(self, jobs: Iterable[Submission]) -> dict[str, JobState]:
        # SLURM's qstat says nothing about a job that it does not know.
        answer = query(["qstat", "-f", *map(str, jobs)], "^$|Unknown Job|has finished")
        answer = re.sub(r"\n\t(?![\w.]+ = )", "", answer)  # PBS folds long lines
        states = {}
        for text in re.split(r"^Job Id:\s*", answer, flags=re.MULTILINE)[1:]:
            job, *lines = text.splitlines()
            facts = dict(line.strip().partition(" = ")[::2] for line in lines)
            hosts = re.findall(r"(?:^|\+)\(*([^/+]+)", facts.get("exec_host", ""))
            state, start = facts["job_state"], facts.get("stime") or facts.get("mtime")
            known = self._STATES.get(state, "RUNNING")
            states[job] = JobState(job, known, facts.get("comment", ""), ",".join(hosts), start)
        return states

    def hosts(self, env: Mapping[str, str]) -> list[str] | None:
        # SLURM's qsub sets no PBS_NODEFILE.
        return _lines(env.get("PBS_NODEFILE")) or SlurmSystem().hosts(env)

    def options(self, config: ResolvedConfig, name: str, logs: Path) -> list[str]:
        launcher, settings = config.launcher, config.launcher.batch
        gpus = f":ngpus={launcher.devices}" if launcher.device == "cuda" else ""
        resources = settings.resources or f"ncpus={_cpus(config)}{gpus}"
        seconds = time_limit_s(settings.time)
        options = {
            "-N ": _job_name(name),
            "-o ": str(logs / "pbs.out"),
            "-l select=": f"{_nodes(config)}:{resources}:mpiprocs=1",
            "-l walltime=": None if seconds is None else str(seconds),
            "-q ": settings.queue,
            "-A ": settings.account,
        }
        return ["-j oe", "-r y", "-l place=scatter:excl", *_given(options), *settings.directives]

    def listening(self, config: ResolvedConfig, logs: Path) -> str:
        return f'{super().listening(config, logs)}cd "$PBS_O_WORKDIR"\n'


class Lsf(BatchSystem):
    """IBM Spectrum LSF."""

    name = "lsf"
    title = "LSF"
    commands = ("bsub", "bkill", "bkill -s")
    directive = "#BSUB "
    job = "$LSB_JOBID"
    number = "<([0-9]+)>"  # Job <12> is submitted to queue <normal>.
    interactive = "type the command in the shell of `bsub -Is -n 2 bash`"
    _STATES = dict.fromkeys(("PEND", "PSUSP", "WAIT"), "PENDING") | {
        "DONE": "COMPLETED", "EXIT": "FAILED", "ZOMBI": "FAILED"
    }  # fmt: skip

    def arguments(self, script: str, tasks: Sequence[int], at_once: int | None = None) -> list[str]:
        return []

    def states(self, jobs: Iterable[Submission]) -> dict[str, JobState]:
        columns = "jobid stat exec_host start_time delimiter='|'"
        answer = query(["bjobs", "-a", "-noheader", "-o", columns, *map(str, jobs)], "is not found")
        states = {}
        for job, state, hosts, start in (line.split("|") for line in answer.splitlines()):
            nodes = re.sub(r"(^|:)[0-9]+\*", r"\1", hosts.strip("-")).replace(":", ",")
            states[job] = JobState(job, self._STATES.get(state, "RUNNING"), "", nodes, start)
        return states

    def hosts(self, env: Mapping[str, str]) -> list[str] | None:
        counts = env.get("LSB_MCPU_HOSTS")  # h1 8 h2 8
        return _lines(env.get("LSB_DJOB_HOSTFILE")) or (counts.split()[::2] if counts else None)

    def options(self, config: ResolvedConfig, name: str, logs: Path) -> list[str]:
        launcher, settings, cpus = config.launcher, config.launcher.batch, _cpus(config)
        seconds = time_limit_s(settings.time)
        counted = any(option.startswith("-nnodes") for option in settings.directives)
        options = {
            "-J ": _job_name(name),
            "-o ": str(logs / "lsf.out"),
            "-n ": None if counted else str(_nodes(config) * cpus),
            "-R ": None if counted else f"span[ptile={cpus}]",
            "-gpu ": settings.resources
            or (f"num={launcher.devices}" if launcher.device == "cuda" else None),
            "-W ": None if seconds is None else str(-(-seconds // 60)),
            "-q ": settings.queue,
            "-P ": settings.account,
        }
        return ["-r", "-x", *_given(options), *settings.directives]


SYSTEMS: dict[str, BatchSystem] = {one.name: one for one in (SlurmSystem(), Pbs(), Lsf())}
"""The batch systems, by `launcher.name`."""


def _nodes(config: ResolvedConfig) -> int:
    return (node_range(config.launcher.nodes) or (1, 1))[1]


def _cpus(config: ResolvedConfig) -> int:
    """Return the CPUs of a node that the ranks need: at least one for each."""
    devices, threads = config.launcher.devices, config.launcher.threads
    assert isinstance(devices, int)
    return devices * (threads if isinstance(threads, int) else 1)


def _job_name(name: str) -> str:
    """Return the name of a job without the characters that have a meaning there."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", name)


def _given(options: Mapping[str, str | None]) -> list[str]:
    return [option + shlex.quote(value) for option, value in options.items() if value is not None]


def _lines(file: str | None) -> list[str] | None:
    """Return the different lines of a file of hosts; None if there is no file."""
    if file is None:
        return None
    return list(dict.fromkeys(Path(file).read_text("utf-8").split()))
