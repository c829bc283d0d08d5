"""Rules of the layout on given hosts: the number of ranks equals that of their slots."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from itertools import accumulate
from typing import Literal

from nanoscale.common.errors import Violation
from nanoscale.config import hostnames
from nanoscale.config.composing import nodes
from nanoscale.config.machines import Host
from nanoscale.config.rules.resolution import Resolution, counted

_MOST_ENTRIES = 8
"""The most entries; a longer filter would not help."""


def check_slots(resolution: Resolution, device: Literal["cpu", "cuda"]) -> None:
    """Check the slots of this machine against its GPUs; those of other hosts are counted when they connect."""
    if resolution.remote or device == "cpu" or resolution.devices.kind == "cpu":
        return
    for host in resolution.hosts:
        highest = max(host.devices) + 1 if host.devices else host.slots
        if highest > resolution.devices.count:
            there = counted(resolution.devices.count, "GPU")
            message = f"asks {host.name} for {counted(highest, 'slot')}, and it has {there}"
            line = f"{host.name} slots={resolution.devices.count}"
            resolution.add("layout", Violation("", host.name, host.source, message, (line,)))


def refuse_degree(resolution: Resolution, dp: int, copy: int) -> None:
    """Refuse a fixed data-parallel degree that makes more or fewer ranks than there are slots."""
    layout, world = resolution.config.parallel, dp * copy
    resolution.refuse(
        "layout",
        "parallel.dp",
        f"makes dp·tp·pp·cp = {dp}·{layout.tp}·{layout.pp}·{layout.cp} = {world} ranks, and "
        f"{slots_of(resolution)} = {resolution.slots} must be the same number",
        f"parallel.dp={resolution.slots // copy}",
        first_hosts(resolution, lambda slots: slots == world) or _part_of_hosts(resolution, world),
    )


def slots_of(resolution: Resolution) -> str:
    """Describe the number of slots that ranks are compared with."""
    return f"the slots of {counted(len(resolution.hosts), 'host')}"


def first_hosts(resolution: Resolution, fits: Callable[[int], bool]) -> str | None:
    """Return the option for fewer hosts: as many of the first ones as have slots that fit."""
    if nodes.elastic(resolution.config.launcher.nodes):
        return None
    counts = [
        n for n, slots in enumerate(accumulate(h.slots for h in resolution.hosts), 1) if fits(slots)
    ]
    return f"--num-nodes {counts[-1]}" if counts else None


def _part_of_hosts(resolution: Resolution, world: int) -> str | None:
    """Return the filter that leaves `world` slots, the first ones."""
    launcher = resolution.config.launcher
    counted_out = launcher.nodes is not None or launcher.devices != "auto"
    if launcher.hostfile is None or launcher.exclude is not None or counted_out:
        return None
    entries = []
    for host in resolution.hosts:
        taken = min(host.slots, world)
        if taken:
            entries.append(_entry(host, taken))
        world -= taken
    fits = world == 0 and len(entries) <= _MOST_ENTRIES
    return f"--include {shlex.quote('@'.join(entries))}" if fits else None


def _entry(host: Host, taken: int) -> str:
    name = hostnames.in_filter(host.name)
    if taken == host.slots and host.devices is None:
        return name
    devices = host.devices or range(host.slots)
    return f"{name}:{','.join(map(str, devices[:taken]))}"
