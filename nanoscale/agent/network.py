"""This host's place in the network, as the other hosts of a job see it."""

from __future__ import annotations

import ipaddress
import os
import socket
from contextlib import suppress


def addresses() -> dict[str, str]:
    """Every address of this host, with the interface that has it."""
    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    return {
        entry.address.partition("%")[0]: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in families
    }


def names() -> list[str]:
    """What this host may be called in a hostfile or by SLURM."""
    own = socket.gethostname()
    known = (own, own.partition(".")[0], socket.getfqdn(), os.environ.get("SLURMD_NODENAME"))
    return [name for name in dict.fromkeys(known) if name]


def resolve(host: str) -> list[str]:
    """The addresses that a name stands for here; none where it stands for nothing."""
    with suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found))
    return []


def is_loopback(address: str) -> bool:
    """Return True for an IPv4 address that no other host can reach."""
    try:
        return ipaddress.IPv4Address(address).is_loopback
    except ValueError:
        return False


def interface_towards(host: str) -> str | None:
    """The interface that packets to a host leave by; None where no way is known."""
    with suppress(OSError, UnicodeError):
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return addresses().get(str(probe.getsockname()[0]).partition("%")[0])
    return None
