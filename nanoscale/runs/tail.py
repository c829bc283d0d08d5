"""Readers of a file that grows."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

LONGEST_LINE = 1 << 20
"""Bytes; a longer line counts as several."""
_READ_BYTES = 1 << 20


def read_end(path: Path, limit: int) -> bytes:
    """Return the last bytes of a file, at most `limit` of them, from the beginning of a line.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        start = max(0, os.fstat(file.fileno()).st_size - limit)
        file.seek(start)
        data = file.read(limit)
    return data.partition(b"\n")[2] or data if start else data


class LineSplitter:
    """A splitter of bytes into lines as they come, in time proportional to the bytes.

    Args:
        longest: a line with this many bytes and no end yet is returned as it is.
    """

    def __init__(self, longest: int = LONGEST_LINE) -> None:
        self._longest = longest
        self._partial_line: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that end in `data`, without their ends."""
        first, *others = data.split(b"\n")
        lines = []
        for end in others:
            lines.append(b"".join([*self._partial_line, first]))
            self._partial_line, self._size, first = [], 0, end
        if first:
            self._partial_line.append(first)
            self._size += len(first)
        if self._size >= self._longest:
            lines.append(self.take_remainder())
        return lines

    def take_remainder(self) -> bytes:
        """Return the bytes after the last line's end, and forget them."""
        remainder, self._partial_line, self._size = b"".join(self._partial_line), [], 0
        return remainder


class FileTail:
    """A reader of bytes added to a file since the last read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.replaced = False
        """True if the last read started from the beginning, because the file was replaced or truncated."""
        self._offset = 0
        self._inode = 0

    def read(self, limit: int = -1) -> bytes:
        """Return the new bytes, at most `limit` of them. A replaced file is read from its start."""
        try:
            with self.path.open("rb", buffering=0) as file:
                self._check_replaced(os.fstat(file.fileno()))
                file.seek(self._offset)
                data = file.read(limit)
        except FileNotFoundError:
            return b""
        self._offset += len(data)
        return data

    def skip(self, keep: int) -> int:
        """Skip all new bytes but the last `keep`; return the number of skipped bytes."""
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return 0
        self._check_replaced(status)
        count = max(0, status.st_size - keep - self._offset)
        self._offset += count
        return count

    def _check_replaced(self, status: os.stat_result) -> None:
        self.replaced = status.st_ino != self._inode or status.st_size < self._offset
        if self.replaced:
            self._inode, self._offset = status.st_ino, 0


class LineTail:
    """A reader of lines added since the last poll, once their ends have arrived."""

    def __init__(self, path: Path, longest: int = LONGEST_LINE) -> None:
        self.path = path
        self.grew_at = time.monotonic()
        """The time of the last new bytes."""
        self._file = FileTail(path)
        self._lines = LineSplitter(longest)

    def poll(self, limit: int = -1) -> list[bytes]:
        """Return the new complete lines of at most `limit` new bytes."""
        return self._lines.feed(self._read(limit))

    def batches(self) -> Iterator[list[bytes]]:
        """Yield the new complete lines of a file that may be larger than memory, in batches."""
        while data := self._read(_READ_BYTES):
            yield self._lines.feed(data)

    def take_remainder(self) -> bytes:
        """Return the bytes after the last line's end, and forget them."""
        return self._lines.take_remainder()

    def skip(self, keep: int) -> int:
        """Skip all new bytes but the last `keep`; return the number of skipped bytes."""
        count = self._file.skip(keep)
        if self._file.replaced:
            self._lines.take_remainder()
        return count

    def _read(self, limit: int) -> bytes:
        data = self._file.read(limit)
        if self._file.replaced:
            self._lines.take_remainder()
        if data:
            self.grew_at = time.monotonic()
        return data
