"""What a launcher and the agent of a host say to each other: JSON documents, one a line.

A message may carry raw bytes, such as what a rank prints. They follow its line, which says how many they are.
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


LONGEST_LINE = 1 << 24
"""bytes of a message without what it carries; a line that is longer is no message"""
MOST_BYTES = 1 << 20
"""that a message may carry"""

_COUNT = "bytes"
"""key of a message that carries bytes: how many follow its line"""


def pack(message: Message, carried: bytes = b"") -> bytes:
    """Return what is sent of a message before the bytes that it carries.

    Raises:
        ValueError: it is too long for the other end.
    """
    counted = {**message, _COUNT: len(carried)} if carried else message
    line = _BEGINNING + json.dumps(counted).encode() + b"\n"
    if len(line) > LONGEST_LINE or len(carried) > MOST_BYTES:
        raise ValueError(f"a message of {len(line)} and {len(carried)} bytes is too long")
    return line


class Unpacker:
    """Takes bytes as they come, and gives the messages and stray lines in them.

    What a message carries is in its `carried`. Where it does not come at once, the message is given several
    times, each time with the next bytes. Time is proportional to the bytes, and memory is bounded.
    """

    def __init__(self) -> None:
        self._line: list[bytes] = []
        """the beginning of a line"""
        self._length = 0
        self._carrying: Message = {}
        """the message whose bytes are coming"""
        self._missing = 0
        """how many of them have not come yet"""

    def feed(self, data: bytes) -> Iterator[Message | str]:
        """Give what these bytes complete, and what they carry."""
        start = 0
        while start < len(data):
            if self._missing:
                carried = data[start : start + self._missing]
                self._missing -= len(carried)
                start += len(carried)
                yield {**self._carrying, "carried": carried}
                continue
            end = data.find(b"\n", start)
            piece = data[start : end if end >= 0 else len(data)]
            start += len(piece) + 1
            self._line.append(piece)
            self._length += len(piece)
            if end >= 0 or self._length > LONGEST_LINE:
                item = self._end_line()
                if item is not None:
                    yield item

    def _end_line(self) -> Message | str | None:
        """Read the line that is complete; None where bytes follow it."""
        line, self._line, self._length = b"".join(self._line), [], 0
        item = _read(line)
        if isinstance(item, str) or not item.get(_COUNT):
            return item
        self._carrying, self._missing = item, item[_COUNT]
        return None


def _read(line: bytes) -> Message | str:
    start = line.find(_BEGINNING)  # what was printed before it had no end of line
    if start >= 0:
        with suppress(ValueError):
            message = json.loads(line[start + 1 :])
            if _is_message(message):
                return message  # type: ignore[no-any-return]
    return line.decode(errors="replace")


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("kind"), str):
        return False
    count = value.get(_COUNT, 0)
    return isinstance(count, int) and 0 <= count <= MOST_BYTES


class Sender:
    """Writes whole messages to a file descriptor, from any thread. A reader that is gone is no error."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._closed = False

    def send(self, message: Message, carried: bytes = b"") -> bool:
        """Whether it could be written."""
        line = pack(message, carried)
        with self._lock:
            if self._closed:
                return False
            try:
                self._write(line)
                self._write(carried)
            except OSError:
                return False
        return True

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[os.write(self._descriptor, left) :]

    def close(self) -> None:
        """Write nothing more; after this the descriptor may be closed, and its number be another file's."""
        got = self._lock.acquire(timeout=_WRITE_S)
        self._closed = True
        if got:
            self._lock.release()
