"""The hosts that are never used: `launcher.exclude_file`."""

from collections.abc import Sequence
from pathlib import Path

from nanoscale.common.errors import Violation
from nanoscale.config import machines
from nanoscale.config.values.provenance import Composed
from nanoscale.config.violations import refuse

_KEY = "launcher.exclude_file"


def usable(composed: Composed, hosts: Sequence[machines.Host]) -> list[machines.Host]:
    """Return all hosts but the excluded ones. Raises: see `excluded_hosts`, or if none is left."""
    excluded = excluded_hosts(composed)
    remaining = [host for host in hosts if machines.canonical(host.name) not in excluded]
    if hosts and not remaining:
        composed.refuse(_KEY, f"names every host ({len(hosts)})", f"{_KEY}=null")
    return remaining


def excluded_hosts(composed: Composed) -> set[str]:
    """Return the canonical names of hosts in `launcher.exclude_file`, as it is now.

    Raises:
        UserError: the file cannot be read, or has a line that is not a host.
    """
    file = composed.config.launcher.exclude_file
    if file is None:
        return set()
    try:
        lines = Path(file).expanduser().read_text(encoding="utf-8-sig").split("\n")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        composed.refuse(_KEY, f"cannot be read: {reason}", f"{_KEY}=null")
    texts = enumerate((line.partition("#")[0].strip() for line in lines), 1)
    names = [(number, name) for number, name in texts if name]
    violations = [
        Violation("", name, f"{file}:{number}", f"{machines.problem(name)}: write one host a line")
        for number, name in names
        if machines.problem(name)
    ]
    if violations:
        refuse(violations)
    return {machines.canonical(name) for _, name in names}
