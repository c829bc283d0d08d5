"""Messages between a launcher and the agent of a host: JSON documents, one per line.

A message may carry raw bytes, such as a rank's output. They follow its line, which states their number. Both
ends also send a heartbeat every second, so silence means that the other end is lost, whatever the state of the
connection. Other lines, such as the output of a shell's start-up files, lack the mark of a message.

An agent that connects by itself and the launcher first prove that they know the launch's key. The launcher
sends a random challenge of 32 bytes. The agent answers with a challenge of its own and the HMAC of both. Once
the launcher has proved itself by another HMAC of both, the agent sends its description: 4 bytes of length and
JSON.
"""

import hmac
import json
import os
import socket
import threading
from collections.abc import Generator, Iterator
from contextlib import suppress
from typing import Any

Message = dict[str, Any]

MARK = "NANOSCALE_JOB"
"""The name of the variable that distinguishes a job's processes from all others."""

BEAT_S = 1.0
BEAT: Message = {"kind": "beat"}

TRAINING, BANDWIDTH, EVALUATION, BENCH = "training", "bandwidth", "evaluation", "bench"
CONFORMITY, MODEL_CARD = "conformity", "model card"
"""The jobs of ranks."""
ALONE = ("documents", "export")
"""The rows of a model's card that one process computes alone."""

_WRITE_S = 1.0
"""Seconds for a write in progress; it may hang if nobody reads."""

_RECORD_SEPARATOR = b"\x1e"
"""ASCII's record separator."""


LONGEST_LINE = 1 << 24
"""Bytes of a message without what it carries; a longer line is not a message."""
MOST_BYTES = 1 << 20
"""The most bytes that a message may carry."""

_COUNT = "bytes"
"""The key with the number of bytes that follow a message's line."""


def pack(message: Message, carried: bytes = b"") -> bytes:
    """Return a message's line; the bytes that it carries follow.

    Raises:
        ValueError: it is too long for the other end.
    """
    document = {**message, _COUNT: len(carried)} if carried else message
    line = _RECORD_SEPARATOR + json.dumps(document).encode() + b"\n"
    if len(line) > LONGEST_LINE or len(carried) > MOST_BYTES:
        raise ValueError(f"a message of {len(line)} and {len(carried)} bytes is too long")
    return line


class Unpacker:
    """A parser of bytes as they come into messages and stray lines.

    The bytes that a message carries are in its `carried`. If they arrive in several parts, the message is
    returned several times, each time with the next bytes. Time is proportional to the bytes, and memory is
    bounded.
    """

    def __init__(self) -> None:
        self._line: list[bytes] = []
        """The beginning of a line."""
        self._length = 0
        self._incomplete: Message = {}
        """The message whose bytes are arriving."""
        self._missing = 0
        """The number of its bytes that have not arrived yet."""

    def feed(self, data: bytes) -> Iterator[Message | str]:
        """Yield the messages and lines that these bytes complete, and the bytes that they carry."""
        start = 0
        while start < len(data):
            if self._missing:
                carried = data[start : start + self._missing]
                self._missing -= len(carried)
                start += len(carried)
                yield {**self._incomplete, "carried": carried}
                continue
            end = data.find(b"\n", start)
            part = data[start : end if end >= 0 else len(data)]
            start += len(part) + 1
            self._line.append(part)
            self._length += len(part)
            if end >= 0 or self._length > LONGEST_LINE:
                line, self._line, self._length = b"".join(self._line), [], 0
                item = _read(line)
                if isinstance(item, dict) and item.get(_COUNT):
                    self._incomplete, self._missing = item, item[_COUNT]
                else:
                    yield item


def _read(line: bytes) -> Message | str:
    start = line.find(_RECORD_SEPARATOR)  # the output before it had no end of line
    if start >= 0:
        with suppress(ValueError):
            message = json.loads(line[start + 1 :])
            count = message.get(_COUNT, 0) if isinstance(message, dict) else None
            is_counted = isinstance(count, int) and 0 <= count <= MOST_BYTES
            if is_counted and isinstance(message.get("kind"), str):
                return message  # type: ignore[no-any-return]
    return line.decode(errors="replace")


class Sender:
    """A writer of whole messages to a file descriptor, from any thread. A missing reader is not an error."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._closed = False

    def send(self, message: Message, carried: bytes = b"") -> bool:
        """Send a message; True if it could be written."""
        line = pack(message, carried)
        with self._lock:
            if self._closed:
                return False
            try:
                for data in (line, carried):
                    remaining = memoryview(data)
                    while remaining:
                        remaining = remaining[os.write(self._descriptor, remaining) :]
            except OSError:
                return False
        return True

    def close(self) -> None:
        """Write nothing more; after this the descriptor may be closed, and its number reused."""
        acquired = self._lock.acquire(timeout=_WRITE_S)
        self._closed = True
        if acquired:
            self._lock.release()


# --- handshake --------------------------------------------------------------------------------------

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
    launcher_challenge, challenge = receive(connection, _BYTES), os.urandom(_BYTES)
    connection.sendall(challenge + _prove(key, _AGENT, launcher_challenge, challenge))
    proof = receive(connection, _BYTES)
    if not hmac.compare_digest(proof, _prove(key, _LAUNCHER, launcher_challenge, challenge)):
        raise HandshakeError
    data = json.dumps(content).encode()
    connection.sendall(len(data).to_bytes(_LENGTH_BYTES, "big") + data)


def _prove(key: bytes, sender: bytes, launcher_challenge: bytes, agent_challenge: bytes) -> bytes:
    return hmac.digest(key, sender + launcher_challenge + agent_challenge, "sha256")


def receive(connection: socket.socket, count: int) -> bytes:
    """Return the next bytes, exactly so many. Raises ConnectionError if the other end hangs up before."""
    data = b""
    while len(data) < count:
        received = connection.recv(count - len(data))
        if not received:
            raise ConnectionError("the launcher hung up")
        data += received
    return data
