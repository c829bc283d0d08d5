"""Processes that another program has started, one for each rank: `launcher=env`.

The first process of each host serves as its agent, and the very first one is the launcher as well.
"""

import hashlib
import os
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nanoscale.common.errors import UserError
from nanoscale.config.machines import Host
from nanoscale.config.schema import Config
from nanoscale.config.values.provenance import Composed
from nanoscale.launch.batch.slurm import host_names
from nanoscale.launch.batch.system import BatchError

AGENT_NAME = "NANOSCALE_AGENT_NAME"
"""The name of the variable with the name by which a host's agent introduces itself."""
_VARIABLES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)
"""The variables of torchrun, mpirun and srun with a process's number, their count, and both within its host."""
_SESSION = (
    "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID",
    "SLURM_STEP_ID", "SLURM_RESTART_COUNT",
)  # fmt: skip
"""Variables that are equal in all processes of a start, and differ between many starts."""


@dataclass(frozen=True)
class OuterProcess:
    """One of the processes."""

    host: int
    """The number of its host."""
    hosts: int
    slots: int
    """The processes of each host."""
    local: int
    """Its number within the host."""

    @property
    def launches(self) -> bool:
        """True for the process that is the launcher."""
        return self.host == self.local == 0


def this_process(env: Mapping[str, str] = os.environ) -> OuterProcess:
    """Return the place of this process among all.

    Raises:
        UserError: no known program has started it, or hosts have different numbers of processes.
    """
    for rank_name, count_name, local_name, local_count_name in _VARIABLES:
        if rank_name not in env or count_name not in env:
            continue
        rank, count, local = (_number(env, it) for it in (rank_name, count_name, local_name))
        if rank >= count:
            raise UserError(
                "usage", f"launcher=env: {rank_name}={rank} is not below {count_name}={count}"
            )
        same = re.fullmatch(r"([0-9]+)(\(x[0-9]+\))?", env.get(local_count_name, "1"))
        slots = int(same[1]) if same else 0
        if not slots or count % slots or local >= slots > 1:
            what = f"{local_count_name}={env.get(local_count_name)} of {count_name}={count}"
            raise UserError(
                "usage", f"launcher=env: {what}: each host needs the same number of processes"
            )
        return OuterProcess(rank // slots, count // slots, slots, local)
    raise UserError(
        "usage",
        "launcher=env: RANK and WORLD_SIZE are not set: put torchrun, srun or mpirun before the command, set "
        "them and MASTER_ADDR in each process, or choose launcher=local",
    )


def _number(env: Mapping[str, str], name: str) -> int:
    text = env.get(name, "0")
    if not re.fullmatch(r"[0-9]{1,7}", text):
        raise UserError("usage", f"launcher=env: {name}={text} is not a number of processes")
    return int(text)


def outer_hosts(composed: Composed) -> tuple[Host, ...]:
    """Return the hosts of the processes; a single process of a host may have several ranks."""
    process, launcher = this_process(), composed.config.launcher
    slots = process.slots
    if slots == 1 and launcher.devices != "auto":
        slots = launcher.devices
    elif launcher.devices not in ("auto", slots):
        message = f"is not the {slots} processes of each host"
        composed.refuse("launcher.devices", message, f"launcher.devices={slots}")
    return tuple(Host(name, slots) for name in names(process))


def names(process: OuterProcess, env: Mapping[str, str] = os.environ) -> list[str]:
    """Return the names of the hosts: SLURM's, or numbers if there are several."""
    if process.hosts == 1:
        return [socket.gethostname()]
    if nodes := env.get("SLURM_STEP_NODELIST"):
        try:
            if len(found := host_names(nodes)) == process.hosts:
                return found
        except BatchError:
            pass
    return [f"host{number}" for number in range(process.hosts)]


def session_file(config: Config) -> Path:
    """Return the file at which the processes of this start meet."""
    same = "|".join([str(config.run.name), *(os.environ.get(name, "") for name in _SESSION)])
    digest = hashlib.sha256(same.encode()).hexdigest()[:16]
    return Path(config.run.root).absolute() / f".nanoscale-env-{digest}"


def join_command(process: OuterProcess, config: Config) -> list[str]:
    """Return the command that takes the place of a process that is not the launcher."""
    serves = "serve" if process.local == 0 else "wait"
    limit = str(config.launcher.connect_timeout_s)
    file = str(session_file(config))
    return [sys.executable, "-P", "-m", "nanoscale.agent", "--join", file, limit, serves]
