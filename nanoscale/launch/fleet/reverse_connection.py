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

from nanoscale.agent.network import address_towards, addresses, is_loopback, resolve
from nanoscale.config import hostnames
from nanoscale.config.rules import Host
from nanoscale.processes.handshake import HandshakeError, admit

_PATIENCE_S = 10.0
"""Seconds for a handshake."""
_SPARE = 64
"""Untrusted clients beyond the expected hosts."""
_AT_ONCE = 64
"""Connections that are accepted between two checks of the open ones."""
_NO_FILES_S = 0.1
"""Seconds before the next attempt to accept a connection when no file descriptor is left."""


class ReverseConnection:
    """An authenticated agent, and its own description."""

    def __init__(self, accepted: socket.socket, hello: dict[str, Any]) -> None:
        self.socket = accepted
        self._names = set(hello["names"])
        self._addresses = set(hello["addresses"])

    def find(self, hosts: Sequence[str]) -> str | None:
        """Return the host of this agent: by its name, or else by its address; None if it is none of them."""
        for host in hosts:
            if self._names & {host, host.partition(".")[0]}:
                return host
        return next((host for host in hosts if self._addresses & set(resolve(host))), None)

    def close(self) -> None:
        self.socket.close()


@dataclass(eq=False)
class _Stranger:
    """A connection whose handshake is not over."""

    connection: socket.socket
    address: str
    handshake: Generator[int, bytes, Any]
    wanted: int
    """Bytes that the handshake waits for."""
    since: float = field(default_factory=time.monotonic)
    received: bytes = b""


class ReverseListener:
    """A listener on every interface until closed. It has a `fileno` to wait for, so `new` need not be polled.

    Args:
        hosts: how many agents may connect at the same time.
    """

    def __init__(self, key: bytes, hosts: int) -> None:
        self._key = key
        self._most = hosts + _SPARE
        self._strangers: list[_Stranger] = []
        """The oldest first."""
        self._agents: list[ReverseConnection] = []
        self._deaf_until = 0.0
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._socket = socket.create_server(
            ("", 0), family=family, backlog=1024, dualstack_ipv6=both
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
        elsewhere = [host for host in hosts if not hostnames.is_here(host.name)]
        towards = address_towards((elsewhere or hosts)[0].address) or socket.gethostname()
        others = [own for own in addresses() if ":" not in own and not is_loopback(own)]
        names = dict.fromkeys([towards, socket.gethostname(), *others])
        return ",".join(f"{name}:{port}" for name in names)

    def new(self) -> list[ReverseConnection]:
        """Serve all ready clients, without waiting; return the agents authenticated since the last call."""
        now = time.monotonic()
        ready = [key.data for key, _ in self._selector.select(0)]
        for stranger in filter(
            None, ready
        ):  # first, so that new clients replace nobody who answers
            self._continue(stranger)
        for stranger in [s for s in self._strangers if now - s.since > _PATIENCE_S]:
            self._forget(stranger)
        if self._deaf_until and now > self._deaf_until:
            self._selector.register(self._socket, selectors.EVENT_READ)
            self._deaf_until = 0.0
        if None in ready:
            self._accept()
        agents, self._agents = self._agents, []
        return agents

    def close(self) -> None:
        """Close all unauthenticated connections, and stop listening."""
        for stranger in list(self._strangers):
            self._forget(stranger)
        self._selector.close()
        self._socket.close()

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                accepted, address = self._socket.accept()
            except BlockingIOError:
                return
            except OSError:  # the peer hung up already, or no file descriptor is left
                if not self._drop():
                    self._selector.unregister(self._socket)
                    self._deaf_until = time.monotonic() + _NO_FILES_S
                return
            if len(self._strangers) >= self._most:
                self._drop()
            self._begin(accepted, address[0])

    def _begin(self, accepted: socket.socket, address: str) -> None:
        try:
            accepted.setblocking(False)
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            handshake = admit(accepted, self._key)
            stranger = _Stranger(accepted, address, handshake, next(handshake))
            self._selector.register(accepted, selectors.EVENT_READ, stranger)
        except OSError:
            accepted.close()
        else:
            self._strangers.append(stranger)

    def _continue(self, stranger: _Stranger) -> None:
        """Read available bytes, and finish the handshake if they decide it."""
        try:
            received = stranger.connection.recv(stranger.wanted - len(stranger.received))
            stranger.received += received
            if not received:
                raise HandshakeError
            if len(stranger.received) == stranger.wanted:
                answer, stranger.received = stranger.received, b""
                stranger.wanted = stranger.handshake.send(answer)
        except StopIteration as end:
            self._welcome(stranger, end.value)
        except BlockingIOError:
            pass
        except (OSError, ValueError, HandshakeError):  # the peer is not our agent
            self._forget(stranger)

    def _welcome(self, stranger: _Stranger, hello: dict[str, Any]) -> None:
        self._strangers.remove(stranger)
        self._selector.unregister(stranger.connection)
        stranger.connection.setblocking(True)
        self._agents.append(ReverseConnection(stranger.connection, hello))

    def _drop(self) -> bool:
        """Close the oldest untrusted connection from the address with the most; False if there is none."""
        if not self._strangers:
            return False
        counts = Counter(stranger.address for stranger in self._strangers)
        self._forget(max(self._strangers, key=lambda stranger: counts[stranger.address]))
        return True

    def _forget(self, stranger: _Stranger) -> None:
        self._strangers.remove(stranger)
        self._selector.unregister(stranger.connection)
        stranger.connection.close()
