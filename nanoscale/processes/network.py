"""This host's names, addresses and ports, as other hosts of a job see them."""

import ipaddress
import os
import socket
from contextlib import suppress


class ReservedPort:
    """A port that stays free for our own ranks until this is closed.

    It is bound, so no other process is assigned it; it does not listen and shares its address, so the ranks'
    store can still bind it (SO_REUSEADDR).
    """

    def __init__(self, number: int = 0) -> None:
        """Reserve a port. Raises OSError if a given number is requested and another process listens there."""
        self._socket = socket.socket()
        if number:  # remains of an earlier job are not obstacle
            self._share()
        self._socket.bind(("", number))  # without sharing, so that nobody else has reserved it
        self._share()
        self.number: int = self._socket.getsockname()[1]

    def _share(self) -> None:
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

    def close(self) -> None:
        self._socket.close()


def addresses() -> dict[str, str]:
    """Return every address of this host, with its interface."""
    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    return {
        entry.address.partition("%")[0]: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in families
    }


def names() -> list[str]:
    """List the names that a hostfile or SLURM may use for this host."""
    if given := os.environ.get("NANOSCALE_AGENT_NAME"):
        return [given]
    hostname = socket.gethostname()
    candidates = (
        hostname,
        hostname.partition(".")[0],
        socket.getfqdn(),
        os.environ.get("SLURMD_NODENAME"),
    )
    return [name for name in dict.fromkeys(candidates) if name]


def resolve(host: str) -> list[str]:
    """List the addresses of a name on this host; empty if it does not resolve."""
    with suppress(OSError, UnicodeError):
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in entries))
    return []


def is_loopback(address: str) -> bool:
    """True for an IPv4 address that no other host can reach."""
    try:
        return ipaddress.IPv4Address(address).is_loopback
    except ValueError:
        return False


def interface_towards(host: str) -> str | None:
    """Return the interface of packets to a host; None if there is no route."""
    address = address_towards(host)
    return addresses().get(address) if address is not None else None


def address_towards(host: str) -> str | None:
    """Return the address of this host from which packets to another one are sent; None if there is no route."""
    with suppress(OSError, UnicodeError):
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0]).partition("%")[0]
    return None
