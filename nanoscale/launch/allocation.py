"""The nodes of SLURM as hosts with ranks: those that are to be asked for, and those that were given."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from math import lcm

from nanoscale.config import nodes
from nanoscale.config.compose import Composed
from nanoscale.config.report import refuse
from nanoscale.config.rules import Host
from nanoscale.errors import Violation


def wanted_hosts(composed: Composed) -> tuple[Host, ...]:
    """Nodes such as SLURM is asked for, the most that an elastic job can have.

    Raises:
        UserError: how many there are to be, or how many ranks on each, cannot be known here.
    """
    _, most = _range(composed) or (1, 1)
    slots = _ranks_a_node(composed, most, {})
    return tuple(Host(f"node{number + 1}", slots) for number in range(most))


def given_hosts(
    composed: Composed, environment: Mapping[str, str] = os.environ
) -> tuple[Host, ...]:
    """The nodes of the allocation that this process is in, as many as the job takes.

    Raises:
        UserError: it is in none, or in one that is too small.
    """
    listed = environment.get("SLURM_JOB_NODELIST")
    if listed is None:
        message = "starts ranks in an allocation of SLURM, and this is none"
        ways = ("nanoscale submit …", "salloc --nodes=N nanoscale train launcher=slurm …")
        source = composed.source("launcher.name")
        refuse([Violation("launcher.name", "slurm", source, message, ways)])
    names = expand(listed)
    fewest, most = _range(composed) or (len(names), len(names))
    if len(names) < fewest:
        message = f"is more than the nodes of the allocation, {listed}"
        key, source = "launcher.nodes", composed.source("launcher.nodes")
        refuse([Violation(key, fewest, source, message, (f"{key}={len(names)}",))])
    names = names[:most]
    slots = _ranks_a_node(composed, len(names), environment)
    job = f"SLURM job {environment.get('SLURM_JOB_ID', '')}".strip()
    return tuple(Host(name, slots, source=job) for name in names)


def expand(nodelist: str) -> list[str]:
    """`a[1-2],b` as its names, by SLURM itself."""
    if "[" not in nodelist:
        return nodelist.split(",")
    command = ["scontrol", "show", "hostnames", nodelist]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def cpus_a_node(environment: Mapping[str, str]) -> int | None:
    """CPUs that the allocation has on each of its nodes, the fewest: of `72(x2),36`, 36."""
    given = environment.get("SLURM_JOB_CPUS_PER_NODE")
    counts = re.findall(r"(?:^|,)([0-9]+)", given or "")
    return min(map(int, counts), default=None)


def _range(composed: Composed) -> tuple[int, int] | None:
    wrong = nodes.violation(composed)
    if wrong is not None:
        refuse([wrong])
    return nodes.node_range(composed.config.launcher.nodes)


def _ranks_a_node(composed: Composed, count: int, environment: Mapping[str, str]) -> int:
    launcher, layout = composed.config.launcher, composed.config.parallel
    if launcher.devices != "auto":
        return launcher.devices
    if launcher.device != "cpu":
        wanted = launcher.slurm.gpus or environment.get("SLURM_GPUS_ON_NODE", "")
        gpus = re.findall(r"(?:^|:)([0-9]+)(?=,|$)", wanted)
        if gpus:
            return sum(map(int, gpus))
        key = "launcher.devices"
        message = "must be known here, to ask SLURM for nodes with as many GPUs"
        ways = ("--num-gpus 8", "launcher.device=cpu")
        refuse([Violation(key, "auto", composed.source(key), message, ways)])
    copies = layout.dp_replicate if layout.dp == "auto" else layout.dp
    ranks = copies * layout.tp * layout.pp * layout.cp
    if layout.dp == "auto":
        ranks = lcm(ranks, count)
    return -(-ranks // count)
