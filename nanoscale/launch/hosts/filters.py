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
from nanoscale.config.suggest import nearest
from nanoscale.config.values.composed import Composed

Chosen = dict[str, set[int] | None]
"""Canonical name of a host → its slots in a filter; None: all of them."""

_ENTRY = re.compile(r"(\[[^\[\]]*\]|[^:\[\]]*)(?::([^:\[\]]*))?")
_RANGE = re.compile(r"([0-9]{1,9})-([0-9]{1,9})")
_SLOT = re.compile(r"[0-9]{1,9}")
_FEW = 8
"""Up to this many hosts are all listed, whatever is near."""
_MOST_GUESSES = 8
"""The most guesses, so that a filter for another hostfile is refused at once."""


def select(
    composed: Composed, hosts: Sequence[Host], file: str
) -> tuple[list[Host], list[Violation]]:
    """Return the hosts and slots that the configuration's filter leaves, in the file's order."""
    including, excluding = composed.config.launcher.include, composed.config.launcher.exclude
    if including is not None and excluding is not None:
        key, message = "launcher.exclude", "cannot be given together with launcher.include"
        either = ("launcher.exclude=null", "launcher.include=null")
        return [], [Violation(key, excluding, composed.source(key), message, either)]
    if including is not None:
        key, text, keep = "launcher.include", including, include
    elif excluding is not None:
        key, text, keep = "launcher.exclude", excluding, exclude
    else:
        return list(hosts), []
    chosen, problems, meant = read_filter(text, hosts, file)
    left, instead = keep(hosts, chosen), f"{key}=null"
    if problems and meant is not None and not read_filter(meant, hosts, file)[1]:
        instead = f"--{key.partition('.')[2]} {shlex.quote(meant)}"
    elif not problems and not left:
        problems = [f"leaves no slot of {file}"]
    source = composed.source(key)
    return left, [Violation(key, text, source, problem, (instead,)) for problem in problems]


def include(hosts: Sequence[Host], chosen: Chosen) -> list[Host]:
    """Return only the named hosts and slots."""
    named = [(host, canonical(host.name)) for host in hosts]
    return [_with(host, chosen[name]) for host, name in named if name in chosen]


def exclude(hosts: Sequence[Host], chosen: Chosen) -> list[Host]:
    """Return all but the named ones; a host without remaining slots is dropped."""
    kept = []
    for host in hosts:
        named = chosen.get(canonical(host.name), set())
        left = set() if named is None else set(range(host.slots)) - named
        if left:
            kept.append(_with(host, left if named else None))
    return kept


def _with(host: Host, slots: set[int] | None) -> Host:
    if slots is None:
        return host
    return replace(host, slots=len(slots), devices=tuple(sorted(slots)))


# --- reading --------------------------------------------------------------------------------------


def read_filter(
    text: str, hosts: Sequence[Host], file: str
) -> tuple[Chosen, list[str], str | None]:
    """Return the hosts of a filter, its problems, and the filter that may have been meant."""
    known = {canonical(host.name): host for host in hosts}
    chosen: Chosen = {}
    problems: list[str] = []
    meant: list[str | None] = []
    for entry in (word.strip() for word in text.split("@")):
        try:
            _read_entry(entry, known, chosen)
            meant.append(entry)
        except _UnknownHostError as unknown:
            there = f" ({', '.join(host.address for host in hosts)})" if len(hosts) <= _FEW else ""
            problems.append(f"names {unknown.name or 'no host'}, which is not in {file}{there}")
            guess = len(problems) <= _MOST_GUESSES
            meant.append(_guess(entry, unknown.name, hosts) if guess else None)
        except _WrongEntryError as wrong:
            problems.append(wrong.message)
            meant.append(wrong.meant)
    whole = [entry for entry in meant if entry]
    return chosen, problems, "@".join(whole) if whole and None not in meant else None


class _WrongEntryError(Exception):
    def __init__(self, message: str, meant: str | None) -> None:
        self.message = message
        self.meant = meant
        """The entry that may have been meant; "": none, None: unknown."""


class _UnknownHostError(Exception):
    def __init__(self, name: str) -> None:
        self.name = name


def _read_entry(entry: str, known: dict[str, Host], chosen: Chosen) -> None:
    """Add one `HOST` or `HOST:SLOT,SLOT` to the chosen hosts."""
    if not entry:
        raise _WrongEntryError("has an `@` with nothing beside it", "")
    parts = _ENTRY.fullmatch(entry)
    if parts is None:
        raise _unbracketed(entry, known)
    name, slots = parts[1], parts[2]
    host = known.get(canonical(name))
    if host is None:
        if name and name in {other.name.rpartition("@")[0] for other in known.values()}:
            raise _WrongEntryError(f"names the user {name}; write hosts without users here", "")
        raise _UnknownHostError(name)
    before = chosen.get(canonical(name), set())
    if before is None or (before and slots is None):
        raise _WrongEntryError(f"names {name} twice, once with all its slots", "")
    more = None if slots is None else _read_slots(name, slots, host)
    chosen[canonical(name)] = None if more is None else before | more


def _read_slots(name: str, text: str, host: Host) -> set[int]:
    slots: set[int] = set()
    words = [word.strip() for word in text.split(",")]
    for word in words:
        slot = int(word) if _SLOT.fullmatch(word) else -1
        if _RANGE.fullmatch(word):
            message = f"has the range {word} of {name}; list slots one by one"
        elif slot < 0:
            message = f"names {word!r} of {name}, which is not a slot number"
        elif slot >= host.slots:
            there = "slot 0" if host.slots == 1 else f"slots 0 to {host.slots - 1}"
            message = f"names slot {slot} of {name}, which has {there} ({host.source})"
        else:
            slots.add(slot)
            continue
        raise _WrongEntryError(message, _mended(name, words, host))
    return slots


def _mended(name: str, words: Sequence[str], host: Host) -> str:
    """Return the entry with ranges written out, and with slots that the host has."""
    slots: set[int] = set()
    for word in words:
        ends = _RANGE.fullmatch(word)
        if ends:
            slots.update(range(int(ends[1]), min(int(ends[2]) + 1, host.slots)))
        elif _SLOT.fullmatch(word):
            slots.add(min(int(word), host.slots - 1))
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


def _guess(entry: str, name: str, hosts: Sequence[Host]) -> str | None:
    """Return the entry with the name of the host that may have been meant."""
    near = nearest(name, [host.address for host in hosts], 1)
    if not near or not name:
        return None
    return hostnames.in_filter(near[0]) + entry.removeprefix(name)
