"""Filters of hosts: `launcher.include` and `launcher.exclude`, in DeepSpeed's grammar.

`h1@h2:0,2` is all of h1, and the slots 0 and 2 of h2. A slot that is named twice counts once. Hosts are
written without their `user@`, since `@` separates them here, and IPv6 addresses in brackets, since `:` is a
separator: `[fe80::1]:0,2`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from nanoscale.common.errors import Violation
from nanoscale.config.machines import canonical
from nanoscale.config.rules import Host
from nanoscale.config.values.provenance import Composed
from nanoscale.config.violations import nearest

ChosenSlots = dict[str, set[int] | None]
"""Canonical name of a host → its slots in a filter; None: all of them."""

_ENTRY = re.compile(r"(\[[^\[\]]*\]|[^:\[\]]*)(?::([^:\[\]]*))?")
_RANGE = re.compile(r"[0-9]{1,9}-[0-9]{1,9}")
_SLOT = re.compile(r"[0-9]{1,9}")
_HOSTS_LISTED = 8
"""Up to this many hosts are all listed, whatever is near."""
_MOST_GUESSES = 8
"""The most guesses of names, so that a filter for another hostfile is refused at once."""


def select(
    composed: Composed, hosts: Sequence[Host], file: str
) -> tuple[list[Host], list[Violation]]:
    """Return the hosts and slots that the configuration's filter leaves, in the file's order."""
    include_text, exclude_text = composed.config.launcher.include, composed.config.launcher.exclude
    if include_text is not None and exclude_text is not None:
        message = "cannot be given together with launcher.include"
        suggestions = ("launcher.exclude=null", "launcher.include=null")
        return [], [composed.violation("launcher.exclude", message, *suggestions)]
    if include_text is not None:
        key, text, apply_filter = "launcher.include", include_text, include
    elif exclude_text is not None:
        key, text, apply_filter = "launcher.exclude", exclude_text, exclude
    else:
        return list(hosts), []
    chosen, problems = read_filter(text, hosts, file)
    remaining = apply_filter(hosts, chosen)
    if not problems and not remaining:
        problems = [f"leaves no slot of {file}"]
    return remaining, [composed.violation(key, problem, f"{key}=null") for problem in problems]


def include(hosts: Sequence[Host], chosen: ChosenSlots) -> list[Host]:
    """Return only the named hosts and slots."""
    named = [(host, canonical(host.name)) for host in hosts]
    return [_with_slots(host, chosen[name]) for host, name in named if name in chosen]


def exclude(hosts: Sequence[Host], chosen: ChosenSlots) -> list[Host]:
    """Return all but the named ones; a host without remaining slots is dropped."""
    remaining_hosts = []
    for host in hosts:
        excluded = chosen.get(canonical(host.name), set())
        remaining = set() if excluded is None else set(range(host.slots)) - excluded
        if remaining:
            remaining_hosts.append(_with_slots(host, remaining if excluded else None))
    return remaining_hosts


def _with_slots(host: Host, slots: set[int] | None) -> Host:
    if slots is None:
        return host
    return replace(host, slots=len(slots), devices=tuple(sorted(slots)))


# --- reading --------------------------------------------------------------------------------------


def read_filter(text: str, hosts: Sequence[Host], file: str) -> tuple[ChosenSlots, list[str]]:
    """Return the hosts of a filter, and its problems."""
    known = {canonical(host.name): host for host in hosts}
    users = {host.name.rpartition("@")[0] for host in hosts} - {""}
    chosen: ChosenSlots = {}
    problems = []
    for entry in (part.strip() for part in text.split("@")):
        match = _ENTRY.fullmatch(entry)
        name, slots = (match[1], match[2]) if match is not None else ("", None)
        host = known.get(canonical(name))
        if not entry:
            problems.append("has an `@` with nothing beside it")
        elif match is None:
            remedy = "write an IPv6 address in brackets here, as in [fe80::1]:0,2"
            problems.append(f"holds {entry!r}: {remedy}")
        elif name in users and host is None:
            problems.append(f"names the user {name}; write hosts without users here")
        elif host is None:
            likely = _likely(name, hosts, guess=len(problems) < _MOST_GUESSES)
            problems.append(f"names {name or 'no host'}, which is not in {file}{likely}")
        else:
            problems += _add_slots(chosen, name, slots, host)
    return chosen, problems


def _likely(name: str, hosts: Sequence[Host], *, guess: bool) -> str:
    """Return the hosts that may have been meant, in parentheses: all of few, else the nearest name."""
    names = [host.address for host in hosts]
    if len(names) > _HOSTS_LISTED:
        names = list(nearest(name, names, 1)) if guess and name else []
    return f" ({', '.join(names)})" if names else ""


def _add_slots(chosen: ChosenSlots, name: str, text: str | None, host: Host) -> list[str]:
    """Add one `HOST` or `HOST:SLOT,SLOT` to the chosen hosts; return its problem, if there is one."""
    previous = chosen.get(canonical(name), set())
    if previous is None or (previous and text is None):
        return [f"names {name} twice, once with all its slots"]
    if text is None:
        chosen[canonical(name)] = None
        return []
    slots = set(previous)
    for item in map(str.strip, text.split(",")):
        slot = int(item) if _SLOT.fullmatch(item) else -1
        if _RANGE.fullmatch(item):
            return [f"has the range {item} of {name}; list slots one by one"]
        if slot < 0:
            return [f"names {item!r} of {name}, which is not a slot number"]
        if slot >= host.slots:
            present = "slot 0" if host.slots == 1 else f"slots 0 to {host.slots - 1}"
            return [f"names slot {slot} of {name}, which has {present} ({host.source})"]
        slots.add(slot)
    chosen[canonical(name)] = slots
    return []
