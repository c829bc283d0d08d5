"""The devices of the trials that run at the same time: GPUs of this machine, or hosts of the hostfile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from nanoscale.common.errors import UserError
from nanoscale.common.units import counted
from nanoscale.config.values.provenance import Composed
from nanoscale.launch.request import Request
from nanoscale.launch.transport.transport import read_hosts

_HOST_KEYS = {"launcher", "launcher.name", "launcher.hostfile", "launcher.include"}
_HOST_KEYS |= {"launcher.exclude", "launcher.exclude_file"}
"""Keys that select the hosts of a trial. If they differ between trials, so do the hosts to choose from."""


@dataclass(frozen=True)
class Slot:
    """The devices of one trial; without values, the devices that its configuration requests."""

    gpus: tuple[int, ...] | None = None
    """GPUs of this machine; None: all of them, or none."""
    include: str | None = None
    """The hosts and their devices, in the form of `--include`; None: all that the launcher's keys select."""


def slots_of(
    requests: Sequence[Request], composed: Composed, at_once: int | None, keys: Sequence[str]
) -> list[Slot]:
    """Return a slot for each of the trials that run at the same time.

    Args:
        requests: the requests of the trials that have not ended.
        composed: the configuration of one of them, before a slot was chosen for it.
        at_once: the requested number; None: as many as the devices allow, and one on this machine's CPU.
        keys: the keys that differ between trials.

    Raises:
        UserError: the machine or the hosts have no room for the requested number.
    """
    if not requests:
        return [Slot()]
    config = requests[0].config
    ranks = max(one.config.world_size for one in requests)
    if requests[0].hosts and config.launcher.name != "slurm" and _HOST_KEYS.isdisjoint(keys):
        slots = _host_slots(requests, composed)
        what = f"the hosts of {config.launcher.hostfile} have"
    elif not requests[0].hosts and config.launcher.device == "cuda":
        gpus = requests[0].devices.count
        firsts = range(0, max(1, gpus // ranks) * ranks, ranks)
        slots = [Slot(gpus=tuple(range(first, first + ranks))) for first in firsts]
        what = f"{counted(gpus, 'GPU')} have"
    else:
        return [Slot()] * (at_once or 1)
    if at_once is not None and at_once > len(slots):
        room = f"room for {counted(len(slots), 'trial')} of {counted(ranks, 'rank')}"
        raise UserError("usage", f"--at-once {at_once}: {what} {room}")
    return slots[:at_once]


def _host_slots(requests: Sequence[Request], composed: Composed) -> list[Slot]:
    """Return the groups of hosts, and of devices on them, that have as many as the largest trial needs."""
    launcher = replace(composed.config.launcher, nodes=None, devices="auto")
    hosts = read_hosts(replace(composed, config=replace(composed.config, launcher=launcher)))
    used = zip_longest(*([host.slots for host in one.hosts] for one in requests), fillvalue=0)
    needed = [max(counts) for counts in used]
    groups = [hosts[first : first + len(needed)] for first in range(0, len(hosts), len(needed))]
    slots = []
    for share in range(max(host.slots for host in hosts)):  # other hosts first, then their devices
        for group in groups:
            entries = []
            for host, count in zip(group, needed, strict=False):
                devices = host.used_devices[share * count : (share + 1) * count]
                entries += [host.entry(devices)] if len(devices) == count else []
            slots += [Slot(include="@".join(entries))] if len(entries) == len(needed) else []
    # A trial that needs all devices has the devices that its own keys select.
    return slots if len(slots) > 1 else [Slot()]
