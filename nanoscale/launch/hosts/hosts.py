"""The hosts of a job: the hostfile's content, after filters and numbers are applied.

The lines are DeepSpeed's, `HOST slots=N` with `#` for comments. DeepSpeed ignores unknown text at the end of a
line, accepts zero slots, and runs on this machine alone if the file is missing; here each of these is an
error, and all errors of a file are shown together.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from nanoscale.common.errors import Violation
from nanoscale.common.units import counted
from nanoscale.config import hostnames
from nanoscale.config.composing import nodes
from nanoscale.config.rules import Host
from nanoscale.config.suggest import nearest
from nanoscale.config.values.composed import Composed
from nanoscale.config.violations import override, refuse
from nanoscale.launch.hosts import filters

MOST_SLOTS = 4096
"""More on one host is a typing error."""
LARGEST_FILE = 1 << 24
_SLOTS = re.compile(r"slots=([0-9]{1,18})")
_MEANT = re.compile(r"(?:slots *[=:]? *-?)?([0-9]{1,18})")
"""A number of slots in another form."""
_PORT = re.compile(r"(?<=[^:]):[0-9]+$")
_FEW = 3
"""Up to this many hosts are named if they share a problem."""


def read_hostfile(composed: Composed) -> tuple[Host, ...]:
    """Return the hosts of `launcher.hostfile` in its order; none without a hostfile.

    Raises:
        UserError: with all problems of the hostfile, or else of the choice from it.
    """
    if composed.config.launcher.hostfile is None:
        return ()
    text, name = _read(composed)
    hosts, violations = parse(text, name)
    malformed = nodes.violation(composed)
    if malformed is not None:
        violations.append(malformed)
    if not violations:
        violations += _check_pythons(composed, hosts)
        hosts, wrong = filters.select(composed, hosts, name)
        violations += wrong
    if not violations:
        hosts, violations = _take(composed, hosts, name)
    if violations:
        refuse(violations)
    return tuple(hosts)


def parse(text: str, name: str) -> tuple[list[Host], list[Violation]]:
    """Parse a hostfile's text; return its hosts and its problems. `name` is its name in messages."""
    found: dict[str, Host] = {}
    violations: list[Violation] = []
    for number, line in enumerate(text.split("\n"), 1):
        text_of_line = line.partition("#")[0].strip(" \t\r")
        if not text_of_line:
            continue
        words = re.split(r"[ \t]+", text_of_line)
        source = f"{name}:{number}"
        wrong = _line_problem(words)
        host = Host(words[0], 0, source=source)
        same = hostnames.canonical(host.name)
        first = found.setdefault(same, host)
        if wrong is None and first is not host:
            wrong = f"names {host.name} again, which is in {first.source}", f"# {text_of_line}"
        if wrong is not None:
            message, meant = wrong
            violations.append(Violation("", text_of_line, source, message, (meant,)))
        else:
            found[same] = replace(host, slots=int(words[1][6:]))
    if not found:
        message = "holds no host; each line is `HOST slots=N`"
        violations.append(Violation("", name, name, message, ("localhost slots=8",)))
    return list(found.values()), violations


def _line_problem(words: Sequence[str]) -> tuple[str, str] | None:
    """Return a problem of a line, and the line that may have been meant."""
    name, *rest = words
    slots = _SLOTS.fullmatch(rest[0]) if rest else None
    meant = _MEANT.fullmatch(" ".join(rest)) if slots is None else slots
    count = int(meant[1]) if meant is not None else 0
    proposed = f"slots={count if 1 <= count <= MOST_SLOTS else 'N'}"
    problem = hostnames.problem(name)
    if problem:
        plain = _PORT.sub("", name)
        return f"{name!r} {problem}", f"{'HOST' if hostnames.problem(plain) else plain} {proposed}"
    if slots is None:
        wrong = f"has {' '.join(rest)!r} after {name}" if rest else f"gives no slots for {name}"
        return f"{wrong}; a line is `HOST slots=N`", f"{name} {proposed}"
    if not 1 <= count <= MOST_SLOTS:
        return f"gives {name} {count} slots; there are 1 to {MOST_SLOTS} on a host", f"# {name}"
    if len(rest) > 1:
        return f"has {' '.join(rest[1:])!r} after the slots of {name}", f"{name} {proposed}"
    return None


# --- reading --------------------------------------------------------------------------------------


def _read(composed: Composed) -> tuple[str, str]:
    """Return the hostfile's text and its name in messages."""
    key, name = "launcher.hostfile", str(composed.config.launcher.hostfile)

    def wrong(message: str, *suggestions: str) -> Violation:
        return Violation(key, name, composed.source(key), message, suggestions)

    path = Path(name).expanduser()
    if path.is_dir():
        refuse([wrong("is a folder; it must be a hostfile")])
    try:
        with path.open("rb") as file:
            raw = file.read(LARGEST_FILE + 1)
    except FileNotFoundError:
        refuse([wrong("is a file that does not exist", *_beside(path))])
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not a path"
        refuse([wrong(f"cannot be read: {reason}")])
    if len(raw) > LARGEST_FILE:
        refuse([wrong(f"has more than {LARGEST_FILE} bytes, too many for a hostfile")])
    try:
        return raw.decode("utf-8-sig"), name
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        refuse([Violation("", name, f"{name}:{line}", "is not UTF-8 text")])


def _beside(path: Path) -> Iterator[str]:
    """Yield files in the same folder with similar names."""
    folder = path.parent
    names = [entry.name for entry in folder.iterdir() if entry.is_file()] if folder.is_dir() else []
    for name in nearest(path.name, names):
        yield f"--hostfile {shlex.quote(str(folder / name))}"


# --- selection ------------------------------------------------------------------------------------


def _take(composed: Composed, hosts: list[Host], name: str) -> tuple[list[Host], list[Violation]]:
    """Return the first hosts, `launcher.nodes` of them, each with `launcher.devices` slots."""
    launcher, violations = composed.config.launcher, []
    fewest, most = nodes.node_range(launcher.nodes) or (1, len(hosts))
    if fewest > len(hosts):
        filtered = launcher.include is not None or launcher.exclude is not None
        message = f"is more than the {counted(len(hosts), 'host')} of {name}"
        message += " that its filter leaves" if filtered else ""
        possible = f"{len(hosts)}:{most}" if most > fewest else f"{len(hosts)}"
        option = f"--num-nodes {possible}"
        violations.append(_of_key(composed, "launcher.nodes", message, option))
    hosts = hosts[:most]
    each = launcher.devices
    if each == "auto":
        return hosts, violations
    short = [host for host in hosts if host.slots < each]
    if short:
        named = [f"{host.name} ({host.source})" for host in short[:_FEW]]
        more = f" and of {len(short) - _FEW} more" if len(short) > _FEW else ""
        message = f"is more than the slots of {', '.join(named)}{more}"
        option = f"--num-gpus {min(host.slots for host in short)}"
        violations.append(_of_key(composed, "launcher.devices", message, option))
    return [_first(host, each) for host in hosts], violations


def _first(host: Host, slots: int) -> Host:
    return replace(host, slots=slots, devices=host.devices and host.devices[:slots])


def _check_pythons(composed: Composed, hosts: Sequence[Host]) -> Iterator[Violation]:
    """Check that every host with an interpreter of its own is in the hostfile."""
    key, pythons = "cluster.pythons", composed.config.cluster.pythons
    known = {name for host in hosts for name in (host.name, host.address)} if pythons else set()
    for name in sorted(set(pythons) - known):
        writers = [it for it in composed.history[key] if isinstance(it.value, dict)]
        setting = next(it for it in reversed(writers) if name in it.value)  # type: ignore[operator]
        instead = tuple(_moved(pythons, name, other) for other in nearest(name, known) or [""])
        message = "is not a host of the hostfile"
        yield Violation(f"{key}.{name}", None, setting.source, message, instead)


def _moved(pythons: Mapping[str, str], name: str, other: str) -> str:
    """Return overrides that assign a host's interpreter to another host, "" to none, and keep the others."""
    entries = {other if it == name else it: python for it, python in pythons.items()}
    entries.pop("", None)
    # An override is merged into a file's mapping, so that one is emptied first.
    return " ".join(["~cluster.pythons", override("cluster.pythons", entries)][: 1 + bool(entries)])


def _of_key(composed: Composed, key: str, message: str, *suggestions: str) -> Violation:
    value = getattr(composed.config.launcher, key.partition(".")[2])
    return Violation(key, value, composed.source(key), message, suggestions)
