"""Rules of the world size: the devices of this machine, or the slots of given hosts, against the layout."""

import shlex
from collections.abc import Callable
from itertools import accumulate
from typing import Literal

from nanoscale.common.errors import Violation
from nanoscale.common.units import counted
from nanoscale.config.rules.resolution import Resolution, divisors
from nanoscale.config.rules.rule import Rule
from nanoscale.config.schema import Config, Parallel
from nanoscale.config.values import forms

_MOST_ENTRIES = 8
"""The most entries; a longer filter would not help."""


def ranks_of_copy(layout: Parallel) -> int:
    """Return the ranks of one copy of the model."""
    return layout.tp * layout.pp * layout.cp


def copies(layout: Parallel, ranks: int) -> int | None:
    """Return the data-parallel degree that uses all of the ranks; None if tp·pp·cp does not divide them."""
    dp, rest = divmod(ranks, ranks_of_copy(layout))
    return None if rest or not dp else dp


def keeps_ranks(ranks: int) -> Rule:
    """Return the rule that the degrees make as many ranks as now, for advice on other degrees."""

    def advice(config: Config) -> list[str]:
        dp = copies(config.parallel, ranks)
        return [] if dp is None else [f"parallel.dp={dp}"]

    return Rule("parallel.dp",
        tuple(f"parallel.{name}" for name in ("dp", "tp", "pp", "cp")),
        lambda config: copies(config.parallel, ranks) == config.parallel.dp, "", advice)  # fmt: skip


def resolve_device(resolution: Resolution) -> Literal["cpu", "cuda"]:
    """Return the device type of the ranks."""
    asked = resolution.config.launcher.device
    if asked == "auto":
        return "cuda" if resolution.remote else resolution.devices.kind
    if asked == "cuda" and resolution.devices.kind != "cuda" and not resolution.remote:
        message = "is set, and this host has no GPU"
        resolution.refuse("launcher.device", message, "launcher.device=cpu", kind="layout")
    return asked


# --- this machine ---------------------------------------------------------------------------------


def resolve_degrees(resolution: Resolution, device: Literal["cpu", "cuda"]) -> tuple[int, int]:
    """Return the data-parallel degree and the world size, resolved from the devices."""
    if resolution.hosts:
        return _degrees_on_hosts(resolution, device)
    layout, asked = resolution.config.parallel, resolution.config.launcher.devices
    has_gpus = device == "cuda" and resolution.devices.kind == "cuda"
    limit = resolution.devices.count if has_gpus else None
    if limit is not None and asked != "auto" and asked > limit:
        message = f"is more than the {counted(limit, 'GPU')} of this host"
        fewer, cpu = f"launcher.devices={limit}", "launcher.device=cpu"
        resolution.refuse("launcher.devices", message, fewer, cpu, kind="layout")
    copy = ranks_of_copy(layout)
    if layout.dp != "auto":
        world = layout.dp * copy
        if asked != "auto" and asked != world:
            set_by = resolution.composed.source("launcher.devices")
            other = f"parallel.dp={asked // copy}" if asked % copy == 0 else None
            why = f"launcher.devices={asked} ({set_by}) must be the same number"
            _refuse_degree(resolution, layout.dp, why, f"launcher.devices={world}", other)
        if asked == "auto" and limit is not None and world > limit:
            smaller = f"parallel.dp={limit // copy}" if limit >= copy else None
            why = f"this host has {counted(limit, 'GPU')}"
            _refuse_degree(resolution, layout.dp, why, smaller, "launcher.device=cpu")
        return layout.dp, world
    available = asked if asked != "auto" else limit
    if available is None:
        return layout.dp_replicate, layout.dp_replicate * copy
    exact, on_cpu = asked != "auto", resolution.devices.kind == "cpu"
    if available < copy or (exact and copies(layout, available) is None):
        devices = "launcher.devices" if exact else "the GPUs of this host"
        more = f"launcher.devices={copy}" if exact and on_cpu else None
        instead = more if exact else "launcher.device=cpu"
        _too_large(resolution, copy, available, devices, instead, exact=exact)
    dp = max(1, available // copy)
    return dp, dp * copy


def _degrees_on_hosts(resolution: Resolution, device: Literal["cpu", "cuda"]) -> tuple[int, int]:
    """Return the same for given hosts: every slot is a rank."""
    layout, slots = resolution.config.parallel, resolution.slots
    # the slots of this machine; slots of other hosts are counted when they connect
    if not resolution.remote and "cpu" not in (device, resolution.devices.kind):
        for host in resolution.hosts:
            highest = max(host.devices) + 1 if host.devices else host.slots
            if highest > resolution.devices.count:
                gpus = counted(resolution.devices.count, "GPU")
                message = f"asks {host.name} for {counted(highest, 'slot')}, and it has {gpus}"
                line = f"{host.name} slots={resolution.devices.count}"
                resolution.add("layout", Violation("", host.name, host.source, message, (line,)))
    copy = ranks_of_copy(layout)
    asked = "auto" if forms.elastic(resolution.config.launcher.nodes) else layout.dp
    dp = max(1, slots // copy) if asked == "auto" else asked
    present = f"the slots of {counted(len(resolution.hosts), 'host')}"
    if copies(layout, slots) is None:
        fewer = _first_hosts(resolution, lambda slots: copies(layout, slots) is not None)
        _too_large(resolution, copy, slots, present, fewer, exact=True)
    elif dp * copy != slots:
        why = f"{present} = {slots} must be the same number"
        fewer = _first_hosts(resolution, lambda slots: slots == dp * copy)
        fewer = fewer or _part_of_hosts(resolution, dp * copy)
        _refuse_degree(resolution, dp, why, f"parallel.dp={slots // copy}", fewer)
    return dp, dp * copy


def _too_large(
    resolution: Resolution, copy: int, available: int, devices: str, instead: str | None,
    *, exact: bool,
) -> None:  # fmt: skip
    """Refuse a layout if one copy does not fit the devices; `exact`: all devices must be used."""
    layout = resolution.config.parallel
    axis = max(("tp", "pp", "cp"), key=lambda name: getattr(layout, name))
    degree = getattr(layout, axis)
    rest = copy // degree
    # A divisor of the degree keeps all other divisibilities of the degree.
    fits = [
        n
        for n in divisors(degree)
        if n * rest <= available and (not exact or available % (n * rest) == 0)
    ]
    resolution.refuse(
        f"parallel.{axis}",
        f"makes tp·pp·cp = {copy} ranks for one copy of the model; {devices} = {available} is not a "
        f"multiple of that",
        resolution.completed(f"parallel.{axis}={fits[-1]}") if fits else "parallel=dp",
        instead,
        kind="layout",
    )


def _refuse_degree(resolution: Resolution, dp: int, why: str, *instead: str | None) -> None:
    """Refuse a fixed data-parallel degree that makes more or fewer ranks than there can be."""
    layout = resolution.config.parallel
    ranks = f"{dp}·{layout.tp}·{layout.pp}·{layout.cp} = {dp * ranks_of_copy(layout)} ranks"
    message = f"makes dp·tp·pp·cp = {ranks}, and {why}"
    resolution.refuse("parallel.dp", message, *instead, kind="layout")


# --- hosts ----------------------------------------------------------------------------------------


def _first_hosts(resolution: Resolution, fits: Callable[[int], bool]) -> str | None:
    """Return the option for fewer hosts: as many of the first ones as have slots that fit."""
    if forms.elastic(resolution.config.launcher.nodes):
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
        used = min(host.slots, world)
        if used:
            entries.append(host.entry(host.used_devices[:used]))
        world -= used
    fits = world == 0 and len(entries) <= _MOST_ENTRIES
    return f"--include {shlex.quote('@'.join(entries))}" if fits else None
