"""The devices that a plan is made for, which need not be here."""

import math
from collections.abc import Sequence
from contextlib import suppress

from nanoscale.common.devices import Devices, cores, detect
from nanoscale.config.hardware.data_sheets import CPU, UnknownHardwareError, described
from nanoscale.config.machines import Host
from nanoscale.config.values import forms
from nanoscale.config.values.provenance import Composed
from nanoscale.plan.hardware.hardware import hardware_of


def planned_devices(composed: Composed) -> Devices:
    """Return the devices of the described cluster, as one machine. Without a cluster: this machine's.

    If `cluster.hosts` is null, the layout decides how many hosts there are: enough for `parallel.dp` copies of
    the model, or for one copy if dp is `auto`.

    Raises:
        UserError: the cluster's device is unknown.
    """
    config = composed.config
    if config.cluster.device is None:
        return detect()
    # A job that is not predicted, as with model=hooks, has devices too.
    with suppress(UnknownHardwareError):
        hardware_of(config)
    cluster = described(config)
    per_host, name = cluster.devices_per_host, cluster.device or "unnamed"
    assert per_host is not None
    layout = config.parallel
    needed = layout.tp * layout.pp * layout.cp * (1 if layout.dp == "auto" else layout.dp)
    count = per_host * (cluster.hosts or _asked(composed) or math.ceil(needed / per_host))
    if name == CPU:
        return Devices("cpu", count, cores=cores())
    return Devices("cuda", count, (name,) * count, cores())


def planned_ranks(composed: Composed, devices: Devices, hosts: Sequence[Host]) -> int:
    """Return the number of ranks that the user asks for: slots of hosts, or `launcher.devices` of each host.

    Args:
        devices: the result of `planned_devices`.
        hosts: the hosts of the hostfile; none if all ranks are on machines like the planned ones.
    """
    if hosts:
        return sum(host.slots for host in hosts)
    config = composed.config
    if config.launcher.devices == "auto":
        return devices.count
    per_host = described(config).devices_per_host if config.cluster.device is not None else None
    count = devices.count // per_host if per_host else _asked(composed) or 1
    return count * config.launcher.devices


def _asked(composed: Composed) -> int | None:
    """Return the most hosts of `launcher.nodes`; the rules check invalid values."""
    if forms.nodes_violation(composed) is not None:
        return None
    span = forms.node_range(composed.config.launcher.nodes)
    return span[1] if span else None
