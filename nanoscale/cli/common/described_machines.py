"""The machines that `cluster` describes, for a plan, a rehearsal or a job of a batch system."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from nanoscale.cli.common.request import CommandLine

if TYPE_CHECKING:
    from nanoscale.config.machines import Host
    from nanoscale.config.values.provenance import Composed


def on_described_hosts(line: CommandLine) -> CommandLine:
    """Return the line of a plan or a rehearsal for several hosts. It uses as many devices of each host as the
    launcher would start ranks."""
    from nanoscale.config.rules.launcher import requested_launcher
    from nanoscale.config.values import forms

    composed = line.compose_settings()
    launcher, cluster = composed.config.launcher, composed.config.cluster
    span = None if forms.nodes_violation(composed) else forms.node_range(launcher.nodes)
    hosts = span[1] if span else cluster.hosts
    is_one = span is None and hosts in (None, 1)
    if is_one or cluster.device is None or requested_launcher(composed) != "local":
        return line
    words = ["launcher.nodes=null", f"cluster.hosts={hosts}"]
    if launcher.devices != "auto":
        words += ["launcher.devices=auto", f"cluster.devices_per_host={launcher.devices}"]
    given = {word.partition("=")[0] for word in words}
    others = [word for word in line.overrides or () if word.partition("=")[0] not in given]
    options = {key: setting for key, setting in line.options.items() if key not in given}
    return replace(line, overrides=[*others, *words], options=options)


def planned_hosts(composed: Composed) -> tuple[Host, ...]:
    """Return the hosts of the hostfile, or the nodes that the batch system would be asked for."""
    from nanoscale.config.rules.launcher import BATCH_NAMES, requested_launcher
    from nanoscale.launch.batch.allocation import requested_nodes
    from nanoscale.launch.transport.transport import read_hosts

    is_batch = requested_launcher(composed) in BATCH_NAMES
    return (requested_nodes if is_batch else read_hosts)(composed)


def on_described_nodes(line: CommandLine) -> CommandLine:
    """Return a line with the nodes and devices of the cluster, unless it sets others."""
    from nanoscale.config.hardware.data_sheets import described

    config = line.compose_settings().config
    launcher, cluster, words = config.launcher, config.cluster, []
    if launcher.nodes is None and cluster.hosts is not None:
        words.append(f"launcher.nodes={cluster.hosts}")
    is_open = launcher.devices == "auto" and launcher.device != "cpu" and not launcher.slurm.gpus
    if is_open and cluster.device is not None:
        words.append(f"launcher.devices={described(config).devices_per_host}")
    return replace(line, overrides=[*(line.overrides or ()), *words])
