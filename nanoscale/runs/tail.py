"""Reading a file that grows, line by line."""

from __future__ import annotations

import os
from pathlib import Path


class LineTail:
    """Gives the lines that were added since the last look, once their ends have arrived."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._inode = 0
        self._rest = b""

    def poll(self) -> list[bytes]:
        """The new whole lines. A file that was replaced or shortened is read from its start."""
        new = self._read()
        *lines, self._rest = (self._rest + new).split(b"\n")
        return lines

    def rest(self) -> bytes:
        """What came after the last line's end, and forget it."""
        rest, self._rest = self._rest, b""
        return rest

    def _read(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._inode, self._offset, self._rest = status.st_ino, 0, b""
                if status.st_size == self._offset:
                    return b""
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return b""
        self._offset += len(data)
        return data
