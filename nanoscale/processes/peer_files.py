"""Files in a host's shared memory that other hosts of the job read and write, over authenticated connections.

Both ends prove that they know the job's key, by the handshake of `messages`. Then the client sends requests:
four bytes of length, JSON, and the bytes that a write carries. Each request is answered in the same form.
"""

import fnmatch
import json
import os
import re
import socket
import threading
from contextlib import suppress
from pathlib import Path

from nanoscale.common.json_text import Json
from nanoscale.processes.listener import AuthenticatedListener
from nanoscale.processes.messages import HandshakeError, introduce, receive

COMMITTED = ".json"
"""The suffix of a file that is replaced at once, when all of it has arrived; others are written in place."""
_NAME = re.compile(r"[\w-]+(\.\w+)?")
_PATIENCE_S = 10.0
"""Seconds for a handshake."""
_LIMIT_S = 30.0
"""Seconds without progress after which the other end is lost."""
_UNTRUSTED = 1024
"""Clients in a handshake at the same time: in another layout, all ranks of a job connect to each host."""
_CHECK_S = 1.0
"""Seconds between two searches for handshakes that last too long."""
_LENGTH_BYTES = 4
_MOST_BYTES = 1 << 24
_BLOCK = 1 << 20


class PeerFileServer:
    """A server of the files of one folder, in threads, until this process ends."""

    def __init__(self, folder: Path, key: bytes) -> None:
        self._folder = folder
        self._listener = AuthenticatedListener(key, _UNTRUSTED)
        self.port = self._listener.port
        threading.Thread(target=self._listen, name="memory", daemon=True).start()

    def _listen(self) -> None:
        while True:
            for connection, _ in self._listener.accept(_CHECK_S):
                thread = threading.Thread(
                    target=_serve, args=(connection, self._folder), daemon=True
                )
                with suppress(RuntimeError):  # no further thread can start
                    thread.start()


class PeerFiles:
    """The files of a host's server.

    Raises:
        OSError: the host does not answer, or does not know the key.
    """

    def __init__(self, address: str, port: int, key: bytes) -> None:
        self._connection = socket.create_connection((address, port), _PATIENCE_S)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            introduce(self._connection, key, {})
        except HandshakeError as error:
            raise ConnectionError(f"{address} does not know the key of this job") from error
        self._connection.settimeout(_LIMIT_S)

    def write(self, name: str, data: memoryview | bytes) -> None:
        """Write a file, from its beginning, in place; replace it if its name ends with `COMMITTED`."""
        _send(self._connection, {"write": name, "bytes": len(data)})
        self._connection.sendall(data)
        self._answer()

    def read(self, name: str, start: int = 0, count: int | None = None) -> bytearray:
        """Return bytes of a file; `count=None`: until its end."""
        _send(self._connection, {"read": name, "start": start, "bytes": count})
        data = bytearray(self._answer()["bytes"])
        _receive_into(self._connection, memoryview(data))
        return data

    def names(self, pattern: str) -> list[str]:
        """List the files whose names match a pattern with `*`, by name."""
        _send(self._connection, {"list": pattern})
        names: list[str] = self._answer()["names"]
        return names

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""
        _send(self._connection, {"remove": name})
        self._answer()

    def _answer(self) -> Json:
        answer = _receive(self._connection)
        if answer is None or "error" in answer:
            raise ConnectionError(answer["error"] if answer else "the other host hung up")
        return answer


def write_committed(path: Path, content: bytes) -> None:
    """Replace a file at once."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.new")
    temporary.write_bytes(content)
    temporary.replace(path)


def _serve(connection: socket.socket, folder: Path) -> None:
    """Serve a rank, which is silent until its next checkpoint, until it hangs up."""
    with connection, suppress(OSError, ValueError, KeyError, TypeError):
        while (request := _receive(connection)) is not None:
            try:
                _handle(connection, folder, request)
            except FileNotFoundError as error:
                _send(connection, {"error": str(error)})


def _handle(connection: socket.socket, folder: Path, request: Json) -> None:
    if "list" in request:
        names = sorted(path.name for path in folder.iterdir())
        _send(connection, {"names": fnmatch.filter(names, request["list"])})
        return
    name = str(next(request[kind] for kind in ("write", "read", "remove") if kind in request))
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a file of this folder")
    path = folder / name
    if "remove" in request:
        path.unlink(missing_ok=True)
        _send(connection, {})
    elif "write" in request:
        if path.suffix == COMMITTED:
            write_committed(path, receive(connection, request["bytes"]))
        else:
            _write_in_place(connection, path, request["bytes"])
        _send(connection, {})
    else:
        with path.open("rb") as file:
            size = path.stat().st_size - request["start"]
            count = size if request["bytes"] is None else min(size, request["bytes"])
            _send(connection, {"bytes": count})
            if count:
                connection.sendfile(file, request["start"], count)


def _write_in_place(connection: socket.socket, path: Path, count: int) -> None:
    """Write the bytes that arrive over the file's own, which keeps its pages."""
    block = memoryview(bytearray(min(_BLOCK, count)))
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "wb") as file:
        while count:
            part = block[: min(count, _BLOCK)]
            _receive_into(connection, part)
            file.write(part)
            count -= len(part)
        file.truncate()


def _send(connection: socket.socket, document: Json) -> None:
    data = json.dumps(document).encode()
    connection.sendall(len(data).to_bytes(_LENGTH_BYTES, "big") + data)


def _receive(connection: socket.socket) -> Json | None:
    """Return the next document; None once the other end has hung up."""
    try:
        length = int.from_bytes(receive(connection, _LENGTH_BYTES), "big")
    except ConnectionError:
        return None
    if length > _MOST_BYTES:
        raise ValueError(f"a request of {length} bytes")
    document: Json = json.loads(receive(connection, length))
    return document


def _receive_into(connection: socket.socket, data: memoryview) -> None:
    while data:
        count = connection.recv_into(data)
        if not count:
            raise ConnectionError("the other host hung up")
        data = data[count:]
