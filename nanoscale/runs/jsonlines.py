"""Files of one JSON object a line, that one process appends to while others read."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nanoscale.runs import tail

Object = dict[str, Any]

_END_BYTES = 1 << 16


def append(path: Path, value: Object) -> None:
    """Add one line. Several processes may append to one file: each line is one write.

    A line that a killed writer left unfinished is closed first, so that it costs only itself.
    """
    line = json.dumps(value, ensure_ascii=False) + "\n"
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        # The size of a file grows page by page within a write: another's half line would look like a torn one.
        fcntl.flock(handle, fcntl.LOCK_EX)
        size = os.fstat(handle).st_size
        if size and os.pread(handle, 1, size - 1) != b"\n":
            line = "\n" + line
        os.write(handle, line.encode())
    finally:
        os.close(handle)


def read(path: Path) -> list[Object]:
    """All whole lines; none where there is no such file. Damaged lines are left out."""
    return Tail(path).poll()


def read_end(path: Path) -> list[Object]:
    """The last few lines of a file that may be long."""
    try:
        return list(_objects(tail.read_end(path, _END_BYTES).split(b"\n")[:-1]))
    except FileNotFoundError:
        return []


class Tail:
    """Reads what was added since the last look. A line counts when its end has arrived."""

    def __init__(self, path: Path) -> None:
        self._lines = tail.LineTail(path)

    def poll(self) -> list[Object]:
        """The objects of the new whole lines; damaged lines are left out."""
        return list(_objects(self._lines.poll()))


def _objects(lines: list[bytes]) -> Iterator[Object]:
    for line in lines:
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value
