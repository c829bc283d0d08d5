"""The hosts of a job: the hostfile's content, after filters and numbers are applied.

The lines are DeepSpeed's, `HOST slots=N` with `#` for comments. DeepSpeed ignores unknown text at the end of a
line, accepts zero slots, and runs on this machine alone if the file is missing; here each of these is an
error, and all errors of a file are shown together.
"""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from nanoscale.common.errors import Violation
from nanoscale.common.units import counted
from nanoscale.config import machines
from nanoscale.config.machines import canonical
from nanoscale.config.rules import Host
from nanoscale.config.values import forms
from nanoscale.config.values.excluded_hosts import usable
from nanoscale.config.values.provenance import Composed
from nanoscale.config.violations import nearest, refuse

MOST_SLOTS = 4096
"""More on one host is a typing error."""
LARGEST_FILE = 1 << 24
_SLOTS = re.compile(r"slots=([0-9]{1,18})")
_ANY_NUMBER = re.compile(r"(?:slots *[=:]? *-?)?([0-9]{1,18})")
"""A number of slots in another form."""
_PORT = re.compile(r"(?<=[^:]):[0-9]+$")
_HOSTS_NAMED = 3
"""Up to this many hosts are named if they share a problem."""


def read_hostfile(composed: Composed, *, spares: bool = False) -> tuple[Host, ...]:
    """Return the hosts of `launcher.hostfile` in its order; none without a hostfile.

    Args:
        spares: True to return also the hosts beyond the most of `launcher.nodes`, and the hosts that
            `launcher.exclude_file` names.

    Raises:
        UserError: with all problems of the hostfile, or else of the choice from it.
    """
    if composed.config.launcher.hostfile is None:
        return ()
    text, name = _read(composed)
    hosts, violations = parse(text, name)
    node_violation = forms.nodes_violation(composed)
    if node_violation is not None:
        violations.append(node_violation)
    if not violations:
        hosts, filter_violations = select(composed, hosts, name)
        violations += filter_violations
    if not violations:
        hosts = hosts if spares else usable(composed, hosts)
        hosts, violations = _limit_hosts(composed, hosts, name, spares=spares)
    if violations:
        refuse(violations)
    return tuple(hosts)


def parse(text: str, name: str) -> tuple[list[Host], list[Violation]]:
    """Parse a hostfile's text; return its hosts and its problems. `name` is its name in messages."""
    hosts: dict[str, Host] = {}
    violations: list[Violation] = []
    for number, line in enumerate(text.split("\n"), 1):
        text_of_line = line.partition("#")[0].strip(" \t\r")
        if not text_of_line:
            continue
        fields = re.split(r"[ \t]+", text_of_line)
        source = f"{name}:{number}"
        problem = _line_problem(fields)
        host = Host(fields[0], 0, source=source)
        canonical_name = machines.canonical(host.name)
        first = hosts.setdefault(canonical_name, host)
        if problem is None and first is not host:
            problem = f"names {host.name} again, which is in {first.source}", f"# {text_of_line}"
        if problem is not None:
            message, correction = problem
            violations.append(Violation("", text_of_line, source, message, (correction,)))
        else:
            hosts[canonical_name] = replace(host, slots=int(fields[1][6:]))
    if not hosts:
        message = "holds no host; each line is `HOST slots=N`"
        violations.append(Violation("", name, name, message, ("localhost slots=8",)))
    return list(hosts.values()), violations


def _line_problem(fields: Sequence[str]) -> tuple[str, str] | None:
    """Return a problem of a line, and the line that may have been meant."""
    name, *options = fields
    slots = _SLOTS.fullmatch(options[0]) if options else None
    number = _ANY_NUMBER.fullmatch(" ".join(options)) if slots is None else slots
    count = int(number[1]) if number is not None else 0
    proposed = f"slots={count if 1 <= count <= MOST_SLOTS else 'N'}"
    problem = machines.problem(name)
    if problem:
        host_only = _PORT.sub("", name)
        legal = "HOST" if machines.problem(host_only) else host_only
        return f"{name!r} {problem}", f"{legal} {proposed}"
    if slots is None:
        present = " ".join(options)
        wrong = f"has {present!r} after {name}" if options else f"gives no slots for {name}"
        return f"{wrong}; a line is `HOST slots=N`", f"{name} {proposed}"
    if not 1 <= count <= MOST_SLOTS:
        return f"gives {name} {count} slots; there are 1 to {MOST_SLOTS} on a host", f"# {name}"
    if len(options) > 1:
        return f"has {' '.join(options[1:])!r} after the slots of {name}", f"{name} {proposed}"
    return None


# --- reading --------------------------------------------------------------------------------------


def _read(composed: Composed) -> tuple[str, str]:
    """Return the hostfile's text and its name in messages."""
    key, name = "launcher.hostfile", str(composed.config.launcher.hostfile)
    path = Path(name).expanduser()
    if path.is_dir():
        composed.refuse(key, "is a folder; it must be a hostfile")
    try:
        with path.open("rb") as file:
            raw = file.read(LARGEST_FILE + 1)
    except FileNotFoundError:
        composed.refuse(key, "is a file that does not exist", *_similar_files(path))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not a path"
        composed.refuse(key, f"cannot be read: {reason}")
    if len(raw) > LARGEST_FILE:
        composed.refuse(key, f"has more than {LARGEST_FILE} bytes, too many for a hostfile")
    try:
        return raw.decode("utf-8-sig"), name
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        refuse([Violation("", name, f"{name}:{line}", "is not UTF-8 text")])


def _similar_files(path: Path) -> Iterator[str]:
    """Yield files in the same folder with similar names."""
    folder = path.parent
    names = [entry.name for entry in folder.iterdir() if entry.is_file()] if folder.is_dir() else []
    for name in nearest(path.name, names):
        yield f"--hostfile {shlex.quote(str(folder / name))}"


# --- selection ------------------------------------------------------------------------------------


def _limit_hosts(
    composed: Composed, hosts: list[Host], name: str, *, spares: bool
) -> tuple[list[Host], list[Violation]]:
    """Return the first hosts, `launcher.nodes` of them, each with `launcher.devices` slots."""
    launcher, violations = composed.config.launcher, []
    fewest, most = forms.node_range(launcher.nodes) or (1, len(hosts))
    if fewest > len(hosts):
        filtered = any((launcher.include, launcher.exclude, launcher.exclude_file))
        message = f"is more than the {counted(len(hosts), 'host')} of {name}"
        message += " that its filter leaves" if filtered else ""
        numbers = f"{len(hosts)}:{most}" if most > fewest else f"{len(hosts)}"
        option = f"--num-nodes {numbers}"
        violations.append(composed.violation("launcher.nodes", message, option))
    hosts = hosts if spares else hosts[:most]
    devices = launcher.devices
    if devices == "auto":
        return hosts, violations
    too_few = [host for host in hosts if host.slots < devices]
    if too_few:
        names = [f"{host.name} ({host.source})" for host in too_few[:_HOSTS_NAMED]]
        more = len(too_few) - _HOSTS_NAMED
        others = f" and of {more} more" if more > 0 else ""
        message = f"is more than the slots of {', '.join(names)}{others}"
        option = f"--num-gpus {min(host.slots for host in too_few)}"
        violations.append(composed.violation("launcher.devices", message, option))
    return [
        replace(host, slots=devices, devices=host.devices and host.devices[:devices])
        for host in hosts
    ], violations


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
        key, text = "launcher.include", include_text
    elif exclude_text is not None:
        key, text = "launcher.exclude", exclude_text
    else:
        return list(hosts), []
    chosen, problems = read_filter(text, hosts, file)
    remaining = with_filter(hosts, chosen, includes=include_text is not None)
    if not problems and not remaining:
        problems = [f"leaves no slot of {file}"]
    return remaining, [composed.violation(key, problem, f"{key}=null") for problem in problems]


def with_filter(hosts: Sequence[Host], chosen: ChosenSlots, *, includes: bool) -> list[Host]:
    """Return only the named hosts and slots, or all others; a host without remaining slots is dropped."""
    remaining = []
    for host in hosts:
        named = chosen.get(canonical(host.name), set())
        if not named:  # all of its slots are named, or none
            remaining += [host] if includes == (named is None) else []
        elif slots := named if includes else set(range(host.slots)) - named:
            remaining.append(replace(host, slots=len(slots), devices=tuple(sorted(slots))))
    return remaining


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
