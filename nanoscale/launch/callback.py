"""Agents that were started by a command for all hosts call the launcher back, here.

Both ends prove that they know the key, by multiprocessing's challenge and response.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import TYPE_CHECKING, Any

from nanoscale.config import hostnames
from nanoscale.config.rules import Host

if TYPE_CHECKING:
    from nanoscale.launch.fleet import Member

_PATIENCE_S = 10.0


class Caller:
    """An agent that has proved itself, and what it says it is."""

    def __init__(self, accepted: socket.socket, hello: dict[str, Any]) -> None:
        self.socket = accepted
        self._names = set(hello["names"])
        self._addresses = set(hello["addresses"])

    def find(self, members: Sequence[Member]) -> Member | None:
        """The member that this agent is of: by its name, or else by its address."""
        for member in members:
            if self._names & {member.name, member.name.partition(".")[0]}:
                return member
        for member in members:
            if self._addresses & set(_resolve(member.name)):
                return member
        return None

    def close(self) -> None:
        self.socket.close()


class Callbacks:
    """Listens on every interface until closed."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._callers: queue.SimpleQueue[Caller] = queue.SimpleQueue()
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._socket = socket.create_server(
            ("", 0), family=family, backlog=1024, dualstack_ipv6=both
        )
        threading.Thread(target=self._listen, name="callbacks", daemon=True).start()

    def addresses(self, hosts: Sequence[Host]) -> str:
        """Where these hosts may reach this machine, the likeliest first: `A:PORT,B:PORT`."""
        port = self._socket.getsockname()[1]
        elsewhere = [host for host in hosts if not hostnames.is_here(host.name)]
        towards = own_address((elsewhere or hosts)[0].address)
        names = dict.fromkeys([towards, socket.gethostname(), *_own_addresses()])
        return ",".join(f"{name}:{port}" for name in names)

    def new(self) -> list[Caller]:
        """Those who have come since the last look."""
        callers = []
        with suppress(queue.Empty):
            while True:
                callers.append(self._callers.get_nowait())
        return callers

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _listen(self) -> None:
        while True:
            try:
                accepted, _ = self._socket.accept()
            except OSError:
                return
            # A thread each, so that a stranger who says nothing keeps nobody waiting.
            threading.Thread(target=self._admit, args=(accepted,), daemon=True).start()

    def _admit(self, accepted: socket.socket) -> None:
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hangs_up = threading.Timer(_PATIENCE_S, accepted.shutdown, (socket.SHUT_RDWR,))
        hangs_up.start()
        connection = Connection(os.dup(accepted.fileno()))
        with suppress(Exception):  # whoever it was, it was no agent of ours
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            hello = json.loads(connection.recv_bytes(1 << 16))
            hangs_up.cancel()
            self._callers.put(Caller(accepted.dup(), hello))
        hangs_up.cancel()
        connection.close()
        accepted.close()


def own_address(towards: str) -> str:
    """The address of this machine by which another one would answer it."""
    with suppress(OSError, UnicodeError):
        family, kind, _, _, address = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    return socket.gethostname()


def _own_addresses() -> list[str]:
    """IPv4 addresses of this machine's interfaces, without the loopback."""
    import psutil

    entries = [entry for entries in psutil.net_if_addrs().values() for entry in entries]
    found = [entry.address for entry in entries if entry.family == socket.AF_INET]
    return [address for address in found if not address.startswith("127.")]


def _resolve(name: str) -> list[str]:
    with suppress(OSError, UnicodeError):
        return [str(entry[4][0]) for entry in socket.getaddrinfo(name, None)]
    return []
