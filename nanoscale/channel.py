"""What a launcher and the agent of a host say to each other: JSON documents, one a line.

Both ends also send a beat every second, so that silence means that the other end is lost, whatever became of
the connection. Lines that are no message, as a shell's start-up files print them, are told apart by their mark.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

Message = dict[str, Any]

MARK = "NANOSCALE_JOB"
"""name of the variable that tells a job's processes from all others"""

BEAT_S = 1.0
BEAT: Message = {"kind": "beat"}

TRAINING, BANDWIDTH, EVALUATION, BENCH = "training", "bandwidth", "evaluation", "bench"
"""what ranks may be asked to do"""

_WRITE_S = 1.0
"""for a write that is going on; to a reader that does not read it may hang"""

_BEGINNING = b"\x1e"
"""ASCII's record separator"""


def pack(message: Message) -> bytes:
    return _BEGINNING + json.dumps(message).encode() + b"\n"


class Unpacker:
    """Takes bytes as they come, and gives the messages and stray lines in them."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Message | str]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            yield _read(line)


def _read(line: bytes) -> Message | str:
    start = line.find(_BEGINNING)  # what was printed before it had no end of line
    if start >= 0:
        with suppress(ValueError):
            message = json.loads(line[start + 1 :])
            if isinstance(message, dict) and isinstance(message.get("kind"), str):
                return message
    return line.decode(errors="replace")


class Sender:
    """Writes whole messages to a file descriptor, from any thread. A reader that is gone is no error."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._closed = False

    def send(self, message: Message) -> bool:
        """Whether it could be written."""
        data = memoryview(pack(message))
        with self._lock:
            if self._closed:
                return False
            try:
                while data:
                    data = data[os.write(self._descriptor, data) :]
            except OSError:
                return False
        return True

    def close(self) -> None:
        """Write nothing more; after this the descriptor may be closed, and its number be another file's."""
        got = self._lock.acquire(timeout=_WRITE_S)
        self._closed = True
        if got:
            self._lock.release()


def as_text(data: bytes) -> str:
    """Any bytes as text that JSON can carry; `as_bytes` gives them back."""
    return data.decode(errors="surrogateescape")


def as_bytes(text: str) -> bytes:
    return text.encode(errors="surrogateescape")
