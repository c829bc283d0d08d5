"""A host of a job and its devices. Names of hosts: whether they are safe for ssh, equal, or names of this
machine.

No name server is queried: its answer may take seconds, and may change.
"""

import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from nanoscale.common.errors import user_name

_LONGEST = 253
_FOREIGN = re.compile(r"[^A-Za-z0-9._-]")
"""Characters that a shell, ssh or a file name could misread."""


@dataclass(frozen=True)
class Host:
    """One host of a job."""

    name: str
    """The name in the hostfile: it may be `user@host`, or an IPv6 address."""
    slots: int
    """Ranks to start there."""
    devices: tuple[int, ...] | None = None
    """The devices that they use, if a filter selected some; None: the first ones."""
    source: str = ""
    """The line that defines it, such as `hosts:3`."""

    @property
    def used_devices(self) -> Sequence[int]:
        """The device of each slot, by the host's numbers."""
        return range(self.slots) if self.devices is None else self.devices

    def entry(self, devices: Sequence[int]) -> str:
        """Return the entry of `--include` for some of its devices."""
        name = in_filter(self.name)
        if self.devices is None and len(devices) == self.slots:
            return name
        return f"{name}:{','.join(map(str, devices))}"

    @property
    def address(self) -> str:
        return address(self.name)


def address(name: str) -> str:
    host = name.rpartition("@")[2]
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def canonical(name: str) -> str:
    """Return the same text for two names of one host, as far as the names show it."""
    host = address(name).lower()
    number = _number(host)
    return host if number is None else str(number)


def problem(name: str) -> str:
    """Return a problem of a name, as a sentence without it; empty if there is none."""
    user, at, host = name.rpartition("@")
    if name.startswith("-") or host.startswith("-"):
        return "starts with `-`, like an option of ssh"
    if at and (not user or _FOREIGN.search(user) or user.startswith("-")):
        return "has a user before its `@` that a shell could misread"
    plain = address(name)
    if not plain or len(plain) > _LONGEST:
        return f"must have 1 to {_LONGEST} characters"
    if ":" in plain or plain != host:
        number, percent, zone = plain.partition("%")
        try:
            ipaddress.IPv6Address(number)
        except ValueError:
            return (
                "is not an IPv6 address, and no other name has a colon or brackets; set a port in "
                "~/.ssh/config or launcher.ssh_args"
            )
        if percent and (not zone or _FOREIGN.search(zone)):
            return "has an IPv6 zone that names no interface"
        return ""
    if foreign := _FOREIGN.search(plain):
        return f"holds {foreign[0]!r}; letters, digits, dots, dashes and underscores make a name"
    return ""


def in_filter(name: str) -> str:
    """Return a host in the form of `--include` and `--exclude`: an IPv6 address is in brackets."""
    plain = address(name)
    return f"[{plain}]" if ":" in plain else plain


def is_here(name: str) -> bool:
    """True if a name is `localhost`, this machine's own, or one of its addresses.

    Another user's account on it does not count.
    """
    user = name.rpartition("@")[0]
    if user and user != user_name():
        return False
    host, own = canonical(name), socket.gethostname().lower()
    if is_loopback(name) or host in (own, own.partition(".")[0]):
        return True
    if _number(host) is None:
        return False
    import psutil

    return any(
        canonical(entry.address) == host
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    )


def is_loopback(name: str) -> bool:
    """True if a name means a different machine on every machine."""
    host = address(name).lower()
    number = _number(host)
    return host == "localhost" if number is None else number.is_loopback


def _number(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address that a name is, if it is one; thousands of other names are rejected quickly."""
    if ":" not in host and not host[-1:].isdecimal():
        return None
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


NOTICE_S = {"aws": 120.0, "gcp": 30.0, "azure": 30.0}
"""Seconds between the notice and the end of a spot machine, by the documentation of the clouds."""
