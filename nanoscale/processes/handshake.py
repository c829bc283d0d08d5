"""The handshake of an agent's reverse connection: both ends prove that they know the launch's key.

The launcher sends a random challenge of 32 bytes. The agent answers with a challenge of its own and the HMAC
of both. Once the launcher has proved itself by another HMAC of both, the agent sends its description: 4 bytes
of length and JSON.
"""

from __future__ import annotations

import hmac
import json
import os
import socket
from collections.abc import Generator
from typing import Any

_BYTES = 32
"""The length of a challenge and of an HMAC-SHA256."""
_LENGTH_BYTES = 4
_MOST_BYTES = 1 << 20
"""The most bytes of an agent's description: the names and addresses of one host."""
_AGENT, _LAUNCHER = b"nanoscale agent", b"nanoscale launcher"
"""Prefixes in the HMACs, so that neither can be sent back as the other."""


class HandshakeError(Exception):
    """The other end does not know the key."""


def admit(connection: socket.socket, key: bytes) -> Generator[int, bytes, Any]:
    """Perform the launcher's half: yield the number of bytes needed next, and return the agent's description.

    The connection may be non-blocking: the messages always fit into its empty buffer.

    Raises:
        HandshakeError: the peer does not know the key, or sends too much.
    """
    challenge = os.urandom(_BYTES)
    connection.sendall(challenge)
    answer = yield 2 * _BYTES
    agent_challenge, proof = answer[:_BYTES], answer[_BYTES:]
    if not hmac.compare_digest(proof, _prove(key, _AGENT, challenge, agent_challenge)):
        raise HandshakeError
    connection.sendall(_prove(key, _LAUNCHER, challenge, agent_challenge))
    length = int.from_bytes((yield _LENGTH_BYTES), "big")
    if length > _MOST_BYTES:
        raise HandshakeError
    return json.loads((yield length))


def introduce(connection: socket.socket, key: bytes, content: object) -> None:
    """Perform the agent's half on a blocking connection, and send this agent's description.

    Raises:
        HandshakeError: the peer is not the launcher.
        OSError: the launcher hung up, or did not answer in time.
    """
    launcher_challenge, challenge = _receive(connection, _BYTES), os.urandom(_BYTES)
    connection.sendall(challenge + _prove(key, _AGENT, launcher_challenge, challenge))
    proof = _receive(connection, _BYTES)
    if not hmac.compare_digest(proof, _prove(key, _LAUNCHER, launcher_challenge, challenge)):
        raise HandshakeError
    data = json.dumps(content).encode()
    connection.sendall(len(data).to_bytes(_LENGTH_BYTES, "big") + data)


def _prove(key: bytes, sender: bytes, launcher_challenge: bytes, agent_challenge: bytes) -> bytes:
    return hmac.digest(key, sender + launcher_challenge + agent_challenge, "sha256")


def _receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        received = connection.recv(count - len(data))
        if not received:
            raise ConnectionError("the launcher hung up")
        data += received
    return data
