"""Reverse connections: agents that were started by a command for all hosts connect to the launcher.

A client is untrusted until the handshake is over, and may be anybody on the network. Untrusted clients get no
thread, little memory and little time, and there are never many more of them than expected hosts. Another one
replaces the oldest from the address with the most, so a flood from elsewhere keeps no agent out.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from nanoscale.config import machines
from nanoscale.config.rules import Host
from nanoscale.processes.messages import HandshakeError, admit
from nanoscale.processes.network import address_towards, addresses, is_loopback, resolve

_PATIENCE_S = 10.0
"""Seconds for a handshake."""
_SPARE = 64
"""Untrusted clients beyond the expected hosts."""
_ACCEPTS_PER_POLL = 64
"""Connections that are accepted between two checks of the open ones."""
_NO_FILES_S = 0.1
"""Seconds before the next attempt to accept a connection when no file descriptor is left."""


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


@dataclass(eq=False)
class _UntrustedClient:
    """A connection whose handshake is not over."""

    connection: socket.socket
    address: str
    handshake: Generator[int, bytes, Any]
    needed: int
    """Bytes that the handshake waits for."""
    since: float = field(default_factory=time.monotonic)
    received: bytes = b""


class ReverseListener:
    """A listener on every interface until closed. Wait for its `fileno`, then call `accept_agents`.

    Args:
        hosts: how many agents may connect at the same time.
    """

    def __init__(self, key: bytes, hosts: int) -> None:
        self._key = key
        self._limit = hosts + _SPARE
        self._untrusted: list[_UntrustedClient] = []
        """The oldest first."""
        self._agents: list[ReverseConnection] = []
        self._accept_again_at = 0.0
        is_dual_stack = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if is_dual_stack else socket.AF_INET
        self._socket = socket.create_server(
            ("", 0), family=family, backlog=1024, dualstack_ipv6=is_dual_stack
        )
        self._socket.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)

    def fileno(self) -> int:
        """Return a descriptor that is readable while a client waits to be served."""
        return int(self._selector.fileno())

    def addresses(self, hosts: Sequence[Host]) -> str:
        """Return the addresses of this machine for these hosts, the likeliest first: `A:PORT,B:PORT`."""
        port = self._socket.getsockname()[1]
        remote_hosts = [host for host in hosts if not machines.is_here(host.name)]
        likeliest = address_towards((remote_hosts or hosts)[0].address) or socket.gethostname()
        other_addresses = [
            address for address in addresses() if ":" not in address and not is_loopback(address)
        ]
        names = dict.fromkeys([likeliest, socket.gethostname(), *other_addresses])
        return ",".join(f"{name}:{port}" for name in names)

    def accept_agents(self) -> list[ReverseConnection]:
        """Serve all ready clients, without waiting; return the agents authenticated since the last call."""
        now = time.monotonic()
        ready = [key.data for key, _ in self._selector.select(0)]
        for client in filter(None, ready):  # first, so that new clients replace nobody who answers
            self._continue(client)
        for client in [client for client in self._untrusted if now - client.since > _PATIENCE_S]:
            self._forget(client)
        if self._accept_again_at and now > self._accept_again_at:
            self._selector.register(self._socket, selectors.EVENT_READ)
            self._accept_again_at = 0.0
        if None in ready:
            self._accept()
        agents, self._agents = self._agents, []
        return agents

    def close(self) -> None:
        """Close all unauthenticated connections, and stop listening."""
        for client in list(self._untrusted):
            self._forget(client)
        self._selector.close()
        self._socket.close()

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_PER_POLL):
            try:
                accepted, address = self._socket.accept()
            except BlockingIOError:
                return
            except OSError:  # the peer hung up already, or no file descriptor is left
                if not self._drop():
                    self._selector.unregister(self._socket)
                    self._accept_again_at = time.monotonic() + _NO_FILES_S
                return
            if len(self._untrusted) >= self._limit:
                self._drop()
            self._begin(accepted, address[0])

    def _begin(self, accepted: socket.socket, address: str) -> None:
        try:
            accepted.setblocking(False)
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            handshake = admit(accepted, self._key)
            client = _UntrustedClient(accepted, address, handshake, next(handshake))
            self._selector.register(accepted, selectors.EVENT_READ, client)
        except OSError:
            accepted.close()
        else:
            self._untrusted.append(client)

    def _continue(self, client: _UntrustedClient) -> None:
        """Read available bytes, and finish the handshake if they decide it."""
        try:
            received = client.connection.recv(client.needed - len(client.received))
            client.received += received
            if not received:
                raise HandshakeError
            if len(client.received) == client.needed:
                answer, client.received = client.received, b""
                client.needed = client.handshake.send(answer)
        except StopIteration as end:
            self._authenticate(client, end.value)
        except BlockingIOError:
            pass
        except (OSError, ValueError, HandshakeError):  # the peer is not our agent
            self._forget(client)

    def _authenticate(self, client: _UntrustedClient, hello: dict[str, Any]) -> None:
        self._untrusted.remove(client)
        self._selector.unregister(client.connection)
        client.connection.setblocking(True)
        self._agents.append(ReverseConnection(client.connection, hello))

    def _drop(self) -> bool:
        """Close the oldest untrusted connection from the address with the most; False if there is none."""
        if not self._untrusted:
            return False
        counts = Counter(client.address for client in self._untrusted)
        self._forget(max(self._untrusted, key=lambda client: counts[client.address]))
        return True

    def _forget(self, client: _UntrustedClient) -> None:
        self._untrusted.remove(client)
        self._selector.unregister(client.connection)
        client.connection.close()
