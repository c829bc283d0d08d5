"""Filters of hosts: `launcher.include` and `launcher.exclude`, in DeepSpeed's grammar.

`h1@h2:0,2` is all of h1, and the slots 0 and 2 of h2. A slot that is named twice counts once. Hosts are
written without their `user@`, since `@` separates them here, and IPv6 addresses in brackets, since `:` is a
separator: `[fe80::1]:0,2`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace

from nanoscale.common.errors import Violation
from nanoscale.config import hostnames
from nanoscale.config.hostnames import canonical
from nanoscale.config.rules import Host
from nanoscale.config.values.provenance import Composed
from nanoscale.config.violations import nearest

ChosenSlots = dict[str, set[int] | None]
"""Canonical name of a host → its slots in a filter; None: all of them."""

_ENTRY = re.compile(r"(\[[^\[\]]*\]|[^:\[\]]*)(?::([^:\[\]]*))?")
_RANGE = re.compile(r"([0-9]{1,9})-([0-9]{1,9})")
_SLOT = re.compile(r"[0-9]{1,9}")
_HOSTS_LISTED = 8
"""Up to this many hosts are all listed, whatever is near."""
_MOST_SUGGESTIONS = 8
"""The most guesses, so that a filter for another hostfile is refused at once."""


def select(
    composed: Composed, hosts: Sequence[Host], file: str
) -> tuple[list[Host], list[Violation]]:
    """Return the hosts and slots that the configuration's filter leaves, in the file's order."""
    include_text, exclude_text = composed.config.launcher.include, composed.config.launcher.exclude
    if include_text is not None and exclude_text is not None:
        key, message = "launcher.exclude", "cannot be given together with launcher.include"
        suggestions = ("launcher.exclude=null", "launcher.include=null")
        return [], [Violation(key, exclude_text, composed.source(key), message, suggestions)]
    if include_text is not None:
        key, text, apply_filter = "launcher.include", include_text, include
    elif exclude_text is not None:
        key, text, apply_filter = "launcher.exclude", exclude_text, exclude
    else:
        return list(hosts), []
    chosen, problems, correction = read_filter(text, hosts, file)
    remaining, suggestion = apply_filter(hosts, chosen), f"{key}=null"
    if problems and correction is not None and not read_filter(correction, hosts, file)[1]:
        suggestion = f"--{key.partition('.')[2]} {shlex.quote(correction)}"
    elif not problems and not remaining:
        problems = [f"leaves no slot of {file}"]
    source = composed.source(key)
    return remaining, [Violation(key, text, source, problem, (suggestion,)) for problem in problems]


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


def read_filter(
    text: str, hosts: Sequence[Host], file: str
) -> tuple[ChosenSlots, list[str], str | None]:
    """Return the hosts of a filter, its problems, and the filter that may have been meant."""
    known = {canonical(host.name): host for host in hosts}
    chosen: ChosenSlots = {}
    problems: list[str] = []
    corrections: list[str | None] = []
    for entry in (part.strip() for part in text.split("@")):
        try:
            _read_entry(entry, known, chosen)
            corrections.append(entry)
        except _UnknownHostError as unknown:
            hosts_text = (
                f" ({', '.join(host.address for host in hosts)})"
                if len(hosts) <= _HOSTS_LISTED
                else ""
            )
            problems.append(
                f"names {unknown.name or 'no host'}, which is not in {file}{hosts_text}"
            )
            may_guess = len(problems) <= _MOST_SUGGESTIONS
            corrections.append(_suggest_entry(entry, unknown.name, hosts) if may_guess else None)
        except _WrongEntryError as error:
            problems.append(error.message)
            corrections.append(error.correction)
    corrected = [entry for entry in corrections if entry]
    return chosen, problems, "@".join(corrected) if corrected and None not in corrections else None


class _WrongEntryError(Exception):
    def __init__(self, message: str, correction: str | None) -> None:
        self.message = message
        self.correction = correction
        """The entry that may have been meant; "": none, None: unknown."""


class _UnknownHostError(Exception):
    def __init__(self, name: str) -> None:
        self.name = name


def _read_entry(entry: str, known: dict[str, Host], chosen: ChosenSlots) -> None:
    """Add one `HOST` or `HOST:SLOT,SLOT` to the chosen hosts."""
    if not entry:
        raise _WrongEntryError("has an `@` with nothing beside it", "")
    match = _ENTRY.fullmatch(entry)
    if match is None:
        raise _unbracketed(entry, known)
    name, slots = match[1], match[2]
    host = known.get(canonical(name))
    if host is None:
        if name and name in {other.name.rpartition("@")[0] for other in known.values()}:
            raise _WrongEntryError(f"names the user {name}; write hosts without users here", "")
        raise _UnknownHostError(name)
    chosen_slots = chosen.get(canonical(name), set())
    if chosen_slots is None or (chosen_slots and slots is None):
        raise _WrongEntryError(f"names {name} twice, once with all its slots", "")
    new_slots = None if slots is None else _read_slots(name, slots, host)
    chosen[canonical(name)] = None if new_slots is None else chosen_slots | new_slots


def _read_slots(name: str, text: str, host: Host) -> set[int]:
    slots: set[int] = set()
    items = [item.strip() for item in text.split(",")]
    for item in items:
        slot = int(item) if _SLOT.fullmatch(item) else -1
        if _RANGE.fullmatch(item):
            message = f"has the range {item} of {name}; list slots one by one"
        elif slot < 0:
            message = f"names {item!r} of {name}, which is not a slot number"
        elif slot >= host.slots:
            slots_text = "slot 0" if host.slots == 1 else f"slots 0 to {host.slots - 1}"
            message = f"names slot {slot} of {name}, which has {slots_text} ({host.source})"
        else:
            slots.add(slot)
            continue
        raise _WrongEntryError(message, _corrected(name, items, host))
    return slots


def _corrected(name: str, items: Sequence[str], host: Host) -> str:
    """Return the entry with ranges written out, and with slots that the host has."""
    slots: set[int] = set()
    for item in items:
        bounds = _RANGE.fullmatch(item)
        if bounds:
            slots.update(range(int(bounds[1]), min(int(bounds[2]) + 1, host.slots)))
        elif _SLOT.fullmatch(item):
            slots.add(min(int(item), host.slots - 1))
    return f"{name}:{','.join(map(str, sorted(slots)))}" if slots else name


def _unbracketed(entry: str, known: dict[str, Host]) -> _WrongEntryError:
    """Return the error for several colons: an IPv6 address, whose slots can only be guessed."""
    message = f"holds {entry!r}: write an IPv6 address in brackets here, as in [fe80::1]:0,2"
    name, _, slots = entry.rpartition(":")
    if canonical(entry) in known:
        return _WrongEntryError(message, hostnames.in_filter(entry))
    if canonical(name) in known:
        return _WrongEntryError(message, f"{hostnames.in_filter(name)}:{slots}")
    return _WrongEntryError(message, None)


def _suggest_entry(entry: str, name: str, hosts: Sequence[Host]) -> str | None:
    """Return the entry with the name of the host that may have been meant."""
    similar = nearest(name, [host.address for host in hosts], 1)
    if not similar or not name:
        return None
    return hostnames.in_filter(similar[0]) + entry.removeprefix(name)
