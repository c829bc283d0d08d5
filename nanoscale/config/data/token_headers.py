"""The headers and sizes of token files, checked without reading the tokens. Imports no numpy.

Megatron-LM's `.idx`, little-endian: magic, version (u64), type code (u8), number of sequences (u64), number of
entries of the document index (u64), then the length of each sequence in tokens (i32), its position in the
`.bin` in bytes (i64), and for each document the sequence it begins with (i64), the number of sequences at the
end.

datatrove's `.ds.index`: the end of each document, in tokens (u64).
"""

from __future__ import annotations

import struct
import sys
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
FORMATS = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}
"""Type code of tokens → the array module's letter; 6 and 7 are not integers."""
LOOKED_AT = 1 << 16
"""Tokens at the beginning of a file whose ids are checked."""


class DamagedError(Exception):
    """A damaged file, or one of another format."""

    def __init__(self, path: Path, what: str, kind: str = "damaged token file") -> None:
        super().__init__(f"{kind}: {path}: {what}")
        self.path, self.what, self.kind = path, what, kind


@dataclass(frozen=True)
class Index:
    """The header of an `.idx`."""

    code: int
    sequences: int


def read_index(path: Path) -> Index:
    """Read the header and check the length of the file. Raises DamagedError."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        raw = stream.read(HEADER.size)
    if not raw.startswith(MAGIC):
        raise DamagedError(
            path, "it does not start with the header of an .idx", "not a Megatron index"
        )
    if len(raw) < HEADER.size:
        raise DamagedError(path, f"it ends within its header, after {size} bytes")
    _, version, code, sequences, documents = HEADER.unpack(raw)
    if version != VERSION:
        raise DamagedError(path, f"its version is {version}, not {VERSION}")
    if code not in FORMATS:
        raise DamagedError(path, f"its type code {code} is not a token type")
    expected = HEADER.size + 12 * sequences + 8 * documents
    if size == expected + sequences and sequences > 0:
        raise DamagedError(path, "it holds a mode for each sequence, as multimodal data does")
    if size != expected or documents < 1:
        raise DamagedError(path, f"it holds {size} bytes, and its header declares {expected}")
    return Index(code, sequences)


def check_sizes(tokens: Path, index: Path, described: int) -> None:
    """Check that the `.bin` has the size that its `.idx` describes. Raises DamagedError."""
    size = tokens.stat().st_size
    if size < described:
        raise DamagedError(tokens, f"it holds {size} bytes, and {index.name} declares {described}")
    if size > described:
        what = f"it describes {described} bytes, and {tokens.name} holds {size}"
        raise DamagedError(index, what)
    if size == 0:
        raise DamagedError(tokens, "it holds no token", "no tokens to train on")


def glance_at_megatron(prefix: str) -> int:
    """Return the largest of the first ids, if a few bytes of a pair of files match.

    Raises:
        DamagedError: they do not match.
        OSError: a file cannot be read.
    """
    tokens, index = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    header = read_index(index)
    letter, last = FORMATS[header.code], header.sequences - 1
    described = 0
    if header.sequences:
        with index.open("rb") as stream:
            length = _read(stream, HEADER.size + 4 * last, "<i")
            place = _read(stream, HEADER.size + 4 * header.sequences + 8 * last, "<q")
        described = place + length * array(letter).itemsize
    check_sizes(tokens, index, described)
    return _largest(tokens, letter)


def glance_at_datatrove(path: str) -> int:
    """Return the same for a `.ds` and its `.ds.index`."""
    tokens, index = Path(path), Path(f"{path}.index")
    count, size = read_ends(index), tokens.stat().st_size
    return _largest(tokens, {2: "H", 4: "I"}[bytes_a_token(tokens, index, size, count)])


def read_ends(index: Path) -> int:
    """Return the number of tokens that a `.ds.index` describes. Raises DamagedError."""
    size = index.stat().st_size
    if size == 0 or size % 8:
        raise DamagedError(index, f"it holds {size} bytes, which are not ends of documents")
    with index.open("rb") as stream:
        return _read(stream, size - 8, "<Q")


def bytes_a_token(tokens: Path, index: Path, size: int, count: int) -> int:
    """Return the bytes per token of a `.ds` file of `size` bytes with `count` tokens: 2 or 4. Raises
    DamagedError."""
    if count == 0 or size == 0:
        raise DamagedError(tokens, "it holds no token", "no tokens to train on")
    if size % count or size // count not in (2, 4):
        what = f"it holds {size} bytes, and {index.name} declares {count} tokens of 2 or 4 bytes"
        raise DamagedError(tokens, what)
    return size // count


def _read(stream: BinaryIO, at: int, form: str) -> int:
    stream.seek(at)
    (found,) = struct.unpack(form, stream.read(struct.calcsize(form)))
    return int(found)


def _largest(path: Path, letter: str) -> int:
    """Return the largest of the first ids; a negative one counts as too large for any vocabulary."""
    first = array(letter)
    with path.open("rb") as stream:
        first.frombytes(stream.read(first.itemsize * LOOKED_AT))
    if sys.byteorder == "big":
        first.byteswap()
    return max(first) if min(first) >= 0 else sys.maxsize
