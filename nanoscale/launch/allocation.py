"""The nodes of a job of SLURM: those that it will be asked for, and those that it gave."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from math import lcm

from nanoscale.config import nodes
from nanoscale.config.compose import Composed
from nanoscale.config.report import refuse
from nanoscale.config.rules import Host
from nanoscale.errors import UserError, Violation
from nanoscale.launch.slurm import SlurmError, host_names


def wanted_nodes(composed: Composed) -> tuple[Host, ...]:
    """Nodes such as SLURM is asked for, the most that an elastic job can have.

    Raises:
        UserError: how many there are to be, or how many ranks on each, cannot be known here.
    """
    wrong = nodes.violation(composed)
    if wrong is not None:
        refuse([wrong])
    _, most = nodes.node_range(composed.config.launcher.nodes) or (1, 1)
    slots = _ranks_a_node(composed, most)
    return tuple(Host(f"node{number + 1}", slots) for number in range(most))


def given_nodes(composed: Composed) -> tuple[Host, ...]:
    """The nodes of the job that this process is a part of, as many as `launcher.nodes` says.

    Raises:
        UserError: this is no job of SLURM, or it has too few nodes.
    """
    wrong = nodes.violation(composed)
    if wrong is not None:
        refuse([wrong])
    given = os.environ.get("SLURM_JOB_NODELIST")
    key = "launcher.name"
    if given is None:
        message = "starts ranks within a job of SLURM, and this is none"
        ways = ("nanoscale submit …", "salloc --nodes=2 nanoscale train …")
        refuse([Violation(key, "slurm", composed.source(key), message, ways)])
    try:
        names = host_names(given)
    except SlurmError as error:
        raise UserError("slurm", f"SLURM does not say which nodes {given} are: {error}") from error
    least, most = nodes.node_range(composed.config.launcher.nodes) or (1, len(names))
    if least > len(names):
        key = "launcher.nodes"
        message = f"is more than the {len(names)} nodes of this job ({given})"
        value, source = composed.config.launcher.nodes, composed.source(key)
        refuse([Violation(key, value, source, message, (f"launcher.nodes={len(names)}",))])
    taken = names[:most]
    slots = _ranks_a_node(composed, len(taken), os.environ.get("SLURM_GPUS_ON_NODE"))
    return tuple(Host(name, slots) for name in taken)


def cpus_a_node(environment: Mapping[str, str]) -> int | None:
    """CPUs that the job has on each of its nodes, the fewest: of `72(x2),36`, 36."""
    counts = re.findall(r"(?:^|,)([0-9]+)", environment.get("SLURM_JOB_CPUS_PER_NODE", ""))
    return min(map(int, counts), default=None)


def _ranks_a_node(composed: Composed, count: int, gpus: str | None = None) -> int:
    """How many ranks a node takes; `gpus`: what a node of the job has, where it is known."""
    launcher, layout = composed.config.launcher, composed.config.parallel
    if launcher.devices != "auto":
        return launcher.devices
    if launcher.device != "cpu":
        found = re.findall(r"(?:^|:)([0-9]+)(?=,|$)", gpus or launcher.slurm.gpus or "")
        if found:
            return sum(map(int, found))
        key = "launcher.devices"
        message = "must be known here: it is how many GPUs of a node are used"
        ways = ("--num-gpus 8", "launcher.device=cpu")
        refuse([Violation(key, "auto", composed.source(key), message, ways)])
    copies = layout.dp_replicate if layout.dp == "auto" else layout.dp
    ranks = copies * layout.tp * layout.pp * layout.cp
    if layout.dp == "auto":
        ranks = lcm(ranks, count)
    return -(-ranks // count)
