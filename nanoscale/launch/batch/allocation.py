"""The nodes of a job of a batch system: the requested ones, and the allocated ones."""

import os
import re
import socket
from collections.abc import Mapping
from math import lcm

from nanoscale.common.errors import UserError, Violation
from nanoscale.common.units import counted
from nanoscale.config.rules import Host
from nanoscale.config.values import forms
from nanoscale.config.values.excluded_hosts import usable
from nanoscale.config.values.provenance import Composed
from nanoscale.config.violations import refuse
from nanoscale.launch.batch.system import BatchError
from nanoscale.launch.batch.systems import SYSTEMS

_FIRST_RESERVED_STEP = 0xFFFFFFF0
"""SLURM's own steps have numbers from here on: 4294967290 is an interactive shell."""


def requested_nodes(composed: Composed) -> tuple[Host, ...]:
    """Return the requested nodes, the most that an elastic job can have.

    Raises:
        UserError: the number of nodes, or of ranks on each, is not known here.
    """
    if (violation := forms.nodes_violation(composed)) is not None:
        refuse([violation])
    _, most = forms.node_range(composed.config.launcher.nodes) or (1, 1)
    slots = _ranks_per_node(composed, most)
    return tuple(Host(f"node{number + 1}", slots) for number in range(most))


def allocated_nodes(composed: Composed) -> tuple[Host, ...]:
    """Return the nodes of the job that this process is a part of, `launcher.nodes` of them.

    Raises:
        UserError: this is not a job of the batch system, or it has too few nodes.
    """
    if (violation := forms.nodes_violation(composed)) is not None:
        refuse([violation])
    nodes = usable(composed, [Host(name, 0) for name in nodes_of_job(composed)])
    names = [node.name for node in nodes]
    least, most = forms.node_range(composed.config.launcher.nodes) or (1, len(names))
    if least > len(names):
        message = f"is more than the {len(names)} nodes of this job ({','.join(names)})"
        composed.refuse("launcher.nodes", message, f"launcher.nodes={len(names)}")
    used = names[:most]
    slots = _ranks_per_node(composed, len(used), os.environ.get("SLURM_GPUS_ON_NODE"))
    return tuple(Host(name, slots) for name in used)


def nodes_of_job(composed: Composed, resubmission: str | None = None) -> list[str]:
    """Return the names of the nodes of the job that this process is a part of.

    Args:
        resubmission: the command that queues a run again; None: the run is new.

    Raises:
        UserError: this is not a job of the batch system, or its nodes are unknown.
    """
    system = SYSTEMS[composed.config.launcher.name]
    try:
        names = system.hosts(os.environ)
    except (BatchError, OSError) as error:
        message = f"{system.title} does not list the nodes of this job: {error}"
        raise UserError(system.name, message) from error
    if names is None:
        message = f"starts ranks within a {system.title} job, and this shell is not in one"
        remedy = f"{system.interactive}; to queue a training, type "
        remedy += "`nanoscale submit` instead of `nanoscale train`"
        if resubmission is not None:
            composed.refuse("launcher.name", message, resubmission)
        composed.refuse("launcher.name", message, remedy=remedy)
    return names


def require_one_launcher() -> None:
    """Check that no program starts this command once for each of its tasks.

    Raises:
        UserError: each of the tasks would launch the whole job.
    """
    env = os.environ
    if _in_step(env) and not (env.get("SLURM_PTY_PORT") and env.get("SLURM_PROCID") == "0"):
        # With `srun --pty bash` only the shell of the first task is interactive.
        condition = " and with launcher=slurm, in a job of salloc or sbatch"
        _refuse_copies(env, "srun", "SLURM_STEP_NUM_TASKS", condition)
    if "TORCHELASTIC_RUN_ID" in env:
        _refuse_copies(env, "torchrun", "WORLD_SIZE")
    if "OMPI_COMM_WORLD_RANK" in env:
        _refuse_copies(env, "mpirun", "OMPI_COMM_WORLD_SIZE")


def idle_nodes(env: Mapping[str, str]) -> str | None:
    """Return a sentence about the other nodes of this job of SLURM, which ranks of this machine leave idle."""
    nodes, node = env.get("SLURM_JOB_NODELIST"), env.get("SLURMD_NODENAME")
    if not nodes or _in_step(env):
        return None
    host = node or socket.gethostname().partition(".")[0]
    count = _integer(env, "SLURM_JOB_NUM_NODES") or _integer(env, "SLURM_NNODES")
    if count == 1 and nodes == host:
        return None
    return (
        f"job {env.get('SLURM_JOB_ID')} of SLURM has {counted(count, 'node')} ({nodes}), and all ranks "
        f"will run on {host}; to use the nodes of the job, add launcher=slurm"
    )


def _in_step(env: Mapping[str, str]) -> bool:
    """True in a step that srun has started; SLURM's own steps (batch, extern, interactive) do not count."""
    step = env.get("SLURM_STEP_ID", "")
    return step.isdecimal() and int(step) < _FIRST_RESERVED_STEP


def _refuse_copies(
    env: Mapping[str, str], program: str, variable: str, condition: str = ""
) -> None:
    copies = _integer(env, variable)
    if copies > 1:
        message = (
            f"{program} starts this command {copies} times, and each would launch the whole job"
        )
        remedy = f"type the same command without {program}{condition}, or with launcher=env"
        violation = Violation(variable, copies, "environment", message, remedy=remedy)
        raise UserError("usage", f"{message}. nanoscale starts the ranks itself", [violation])


def _integer(env: Mapping[str, str], name: str) -> int:
    """Return a variable's number; 0 if it is not set."""
    return int(env[name]) if env.get(name, "").isdecimal() else 0


def cpus_a_node(environment: Mapping[str, str]) -> int | None:
    """Return the least CPUs that the job has on a node: for `72(x2),36`, 36."""
    counts = re.findall(r"(?:^|,)([0-9]+)", environment.get("SLURM_JOB_CPUS_PER_NODE", ""))
    return min(map(int, counts), default=None)


def _ranks_per_node(composed: Composed, count: int, gpus: str | None = None) -> int:
    """Return the ranks of a node; `gpus` describes the GPUs of a node of the job, if known."""
    launcher, layout = composed.config.launcher, composed.config.parallel
    if launcher.devices != "auto":
        return launcher.devices
    if launcher.device != "cpu":
        gpu_counts = re.findall(r"(?:^|:)([0-9]+)(?=,|$)", gpus or launcher.slurm.gpus or "")
        if gpu_counts:
            return sum(map(int, gpu_counts))
        message = "must be set here: it says how many GPUs of a node are used"
        composed.refuse("launcher.devices", message, "launcher.devices=8", "launcher.device=cpu")
    replicas = layout.dp_replicate if layout.dp == "auto" else layout.dp
    ranks = replicas * layout.tp * layout.pp * layout.cp
    if layout.dp == "auto":
        ranks = lcm(ranks, count)
    return -(-ranks // count)
