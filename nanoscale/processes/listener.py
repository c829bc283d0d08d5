"""A listener on every interface that admits clients who know a key, and nobody else.

A client is untrusted until the handshake is over, and may be anybody on the network. Untrusted clients get no
thread, little memory and little time, and there is a limit of their number. Another one replaces the oldest
from the address with the most, so a flood from elsewhere keeps no trusted client out.
"""

import selectors
import socket
import time
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from nanoscale.processes.messages import HandshakeError, admit

_PATIENCE_S = 10.0
"""Seconds for a whole handshake."""
_ACCEPTS_PER_POLL = 64
"""Connections that are accepted between two checks of the open ones."""
_NO_FILES_S = 0.1
"""Seconds before the next attempt to accept a connection when no file descriptor is left."""


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


class AuthenticatedListener:
    """A listener until closed. Call `accept` whenever its `fileno` is readable, and now and then.

    Args:
        limit: how many clients may be in a handshake at the same time.
    """

    def __init__(self, key: bytes, limit: int) -> None:
        self._key = key
        self._limit = limit
        self._untrusted: list[_UntrustedClient] = []
        """The oldest first."""
        self._admitted: list[tuple[socket.socket, Any]] = []
        self._accept_again_at = 0.0
        is_dual_stack = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if is_dual_stack else socket.AF_INET
        self._socket = socket.create_server(
            ("", 0), family=family, backlog=1024, dualstack_ipv6=is_dual_stack
        )
        self._socket.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self.port: int = self._socket.getsockname()[1]

    def fileno(self) -> int:
        """Return a descriptor that is readable while a client waits to be served."""
        return int(self._selector.fileno())

    def accept(self, wait_s: float = 0.0) -> list[tuple[socket.socket, Any]]:
        """Serve the clients that are ready within this time; return the connections admitted since the last
        call, which block, with what each client has sent about itself."""
        ready = [key.data for key, _ in self._selector.select(wait_s)]
        now = time.monotonic()
        for client in filter(None, ready):  # first, so that new clients replace nobody who answers
            self._continue(client)
        for client in [client for client in self._untrusted if now - client.since > _PATIENCE_S]:
            self._forget(client)
        if self._accept_again_at and now > self._accept_again_at:
            self._selector.register(self._socket, selectors.EVENT_READ)
            self._accept_again_at = 0.0
        if None in ready:
            self._accept()
        admitted, self._admitted = self._admitted, []
        return admitted

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
            self._trust(client, end.value)
        except BlockingIOError:
            pass
        except (OSError, ValueError, HandshakeError):  # it does not know the key
            self._forget(client)

    def _trust(self, client: _UntrustedClient, hello: Any) -> None:
        self._untrusted.remove(client)
        self._selector.unregister(client.connection)
        client.connection.setblocking(True)
        self._admitted.append((client.connection, hello))

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
