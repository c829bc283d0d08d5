"""Reverse connections: agents that were started by a command for all hosts connect to the launcher."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

from nanoscale.config import machines
from nanoscale.config.rules import Host
from nanoscale.processes.listener import AuthenticatedListener
from nanoscale.processes.network import address_towards, addresses, is_loopback, resolve

_SPARE = 64
"""Untrusted clients beyond the expected hosts."""


class ReverseConnection:
    """An authenticated agent, and its own description."""

    def __init__(self, accepted: socket.socket, hello: dict[str, Any]) -> None:
        self.socket = accepted
        self.names: list[str] = hello["names"]
        self._addresses = set(hello["addresses"])

    def is_at(self, host: str) -> bool:
        """True if the host's name resolves to an address of this agent."""
        return not self._addresses.isdisjoint(resolve(host))

    def close(self) -> None:
        self.socket.close()


class ReverseListener(AuthenticatedListener):
    """A listener for agents. Wait for its `fileno`, then call `accept_agents`.

    Args:
        hosts: how many agents may connect at the same time.
    """

    def __init__(self, key: bytes, hosts: int) -> None:
        super().__init__(key, hosts + _SPARE)

    def addresses(self, hosts: Sequence[Host]) -> str:
        """Return the addresses of this machine for these hosts, the likeliest first: `A:PORT,B:PORT`."""
        remote_hosts = [host for host in hosts if not machines.is_here(host.name)]
        likeliest = address_towards((remote_hosts or hosts)[0].address) or socket.gethostname()
        other_addresses = [
            address for address in addresses() if ":" not in address and not is_loopback(address)
        ]
        names = dict.fromkeys([likeliest, socket.gethostname(), *other_addresses])
        return ",".join(f"{name}:{self.port}" for name in names)

    def accept_agents(self) -> list[ReverseConnection]:
        """Serve all ready clients, without waiting; return the agents authenticated since the last call."""
        return [ReverseConnection(*admitted) for admitted in self.accept()]
