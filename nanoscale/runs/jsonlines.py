"""Files of one JSON object per line, to which one process appends while others read."""

import errno
import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from nanoscale.common.json_text import parse
from nanoscale.processes.scratch import flock
from nanoscale.runs import tail
from nanoscale.runs.directory import no_follow
from nanoscale.runs.documents import damaged

Object = dict[str, Any]

_END_BYTES = (1 << 16, 1 << 22)
"""The bytes at the end of a file that are searched, the second if the first lack the key."""


def append(path: Path, value: Object) -> None:
    """Append one line. Several processes may append to one file: each line is one write.

    A line that a killed writer left unfinished is closed first, so that only this line is lost.
    """
    line = f"{json.dumps(value, ensure_ascii=False)}\n"
    handle = no_follow(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    try:
        # The size of a file grows page by page within a write: another writer's half line would look like a
        # torn one.
        flock(handle, fcntl.LOCK_EX)
        size = os.fstat(handle).st_size
        if size and os.pread(handle, 1, size - 1) != b"\n":
            line = "\n" + line
        if os.write(handle, line.encode()) < len(line.encode()):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(handle)


def read(path: Path) -> list[Object]:
    """Return all complete lines; none if there is no such file. A torn last line is left out.

    Raises:
        UserError: it cannot be read, or holds lines that are not objects.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise damaged(path, f"cannot be read: {error.strerror}") from error
    lines = content.split(b"\n")
    _require_objects(path, lines)
    return list(objects(lines[:-1]))


def last(path: Path, name: str | None = None) -> Object | None:
    """Return the newest complete object, or the newest one with a key; a long file is read from its end.

    Raises UserError like `read`.
    """
    key = b"" if name is None else json.dumps(name).encode()
    for limit in _END_BYTES if name is not None else _END_BYTES[:1]:
        try:
            content = tail.read_end(path, limit)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise damaged(path, f"cannot be read: {error.strerror}") from error
        lines = content.split(b"\n")
        _require_objects(path, lines)
        newest_first = objects(line for line in reversed(lines[:-1]) if key in line)
        value = next((one for one in newest_first if name is None or name in one), None)
        if value is not None or len(content) < limit // 2:
            return value
    return None


def _require_objects(path: Path, lines: list[bytes]) -> None:
    """Raise a UserError unless all lines are objects; a torn one begins like an object, and a crash may leave
    zeros."""
    if any(line[:1] != b"{" and line.strip(b"\0 \t\r")[:1] not in (b"{", b"") for line in lines):
        raise damaged(path, "is not one JSON object per line")


class Tail:
    """A reader of lines added since the last poll. A line counts when its end has arrived."""

    def __init__(self, path: Path) -> None:
        self._lines = tail.LineTail(path)

    def poll(self) -> list[Object]:
        """Return the objects of the new complete lines; damaged lines are left out."""
        return list(objects(self._lines.poll()))


def objects(lines: Iterable[bytes]) -> Iterator[Object]:
    """Yield the objects of lines; damaged lines are left out."""
    for line in lines:
        try:
            value = parse(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value
