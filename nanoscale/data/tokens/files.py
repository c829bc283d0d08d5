"""Tokens on disk, in documents: Megatron-LM's files and datatrove's, read and checked when opened.

Megatron-LM's `.bin` holds the tokens, `.idx` the position of each text (`config.token_files`).
datatrove's DocumentTokenizer writes:

NAME.ds           every token, 2 or 4 bytes each, unsigned, little-endian
NAME.ds.index     the end of each document, in tokens: u64
NAME.ds.metadata  lines: the tokenizer, in newer files with `|` and the bytes of a token; the tokens
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from nanoscale.common.errors import UserError, Violation
from nanoscale.config.token_files import (
    HEADER,
    MAGIC,
    VERSION,
    DamagedError,
    answers_of,
    bytes_a_token,
    check_sizes,
    read_ends,
    read_index,
)

TYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
CODES = {dtype: code for code, dtype in TYPES.items()}

_DATATROVE_TYPES: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
_BLOCK = 1 << 20


def bin_path(prefix: str | Path) -> Path:
    """Return the file of tokens of a prefix; the prefix may hold dots itself."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """Return the index file of a prefix."""
    return Path(f"{prefix}.idx")


def index_parts(dtype: np.dtype[Any], lengths: np.ndarray) -> Iterator[bytes]:
    """Yield the `.idx` of documents of these lengths (int32 [documents], perhaps mapped), in chunks."""
    count = len(lengths)
    starts = range(0, count, _BLOCK)
    yield HEADER.pack(MAGIC, VERSION, CODES[dtype.newbyteorder("<")], count, count + 1)
    for start in starts:
        yield lengths[start : start + _BLOCK].tobytes()
    offset = 0
    for start in starts:
        ends = offset + np.cumsum(lengths[start : start + _BLOCK], dtype="<i8") * dtype.itemsize
        yield offset.to_bytes(8, "little") + ends[:-1].tobytes()
        offset = int(ends[-1])
    for start in range(0, count + 1, _BLOCK):
        yield np.arange(start, min(start + _BLOCK, count + 1), dtype="<i8").tobytes()


def smallest_type(vocab: int) -> np.dtype[Any]:
    """Return the type for ids below `vocab`; Megatron-LM chooses between the same two."""
    return np.dtype("<u2") if vocab <= 1 << 16 else np.dtype("<i4")


class TokenFile(ABC):
    """Tokens on disk, in documents; `len` is the number of documents.

    Opening raises UserError naming the file that is missing, truncated, of another data set or
    not of this format.
    """

    path: Path
    """The file of tokens."""
    tokens: np.ndarray
    """Every token of the file one after the other, 1-D, mapped, read-only."""

    @abstractmethod
    def __len__(self) -> int: ...

    def __getitem__(self, document: int) -> np.ndarray:
        """Return the tokens of one document, 1-D."""
        if not 0 <= document < len(self):
            raise IndexError(document)
        return self.tokens[self.document_start(document) : self.document_start(document + 1)]

    @abstractmethod
    def document_start(self, document: int) -> int:
        """Return a document's start in `tokens`; for `len(self)`, the end of the last document."""

    @abstractmethod
    def document_starts(self, start: int, stop: int) -> np.ndarray:
        """Return the starts of documents [start, stop) in `tokens`, and the end of the last: int64."""

    @abstractmethod
    def document_at(self, token: int) -> int:
        """Return the number of the document that holds the token at this position."""


class IndexedTokens(TokenFile):
    """A memory-mapped pair of Megatron-LM's files; the check reads the whole `.idx` and none of the `.bin`."""

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = Path(prefix)
        self.path = bin_path(prefix)
        idx, tokens = idx_path(prefix), bin_path(prefix)
        _require_files((idx, tokens), self.prefix, " (the path is given without .bin or .idx)")
        with readable():
            code, sequences = read_index(idx)
        self._dtype = TYPES[code]
        raw = np.asarray(np.memmap(idx, mode="r"))
        starts = np.cumsum([HEADER.size, 4 * sequences, 8 * sequences])
        self._lengths = raw[starts[0] : starts[1]].view("<i4")
        self._places = raw[starts[1] : starts[2]].view("<i8")
        self._documents = raw[starts[2] :].view("<i8")
        self._check_index(idx)
        with readable():
            check_sizes(tokens, idx, self._bytes)
        # a plain array over the mapping: np.memmap's own slicing costs microseconds
        self.tokens = np.asarray(np.memmap(tokens, dtype=self._dtype, mode="r"))

    def __len__(self) -> int:
        return len(self._documents) - 1

    def document_starts(self, start: int, stop: int) -> np.ndarray:
        sequences = self._documents[start : stop + 1]
        last = len(self._places)
        offsets = self._places[np.minimum(sequences, last - 1)]
        return np.where(sequences == last, self.tokens.nbytes, offsets) // self._dtype.itemsize

    def document_start(self, document: int) -> int:
        sequence = int(self._documents[document])
        if sequence == len(self._places):
            return len(self.tokens)
        return int(self._places[sequence]) // self._dtype.itemsize

    def document_at(self, token: int) -> int:
        # bisect and not np.searchsorted, which would copy a mapping that is not aligned
        sequence = bisect_right(self._places, token * self._dtype.itemsize) - 1
        return bisect_right(self._documents, sequence, hi=len(self)) - 1

    def _check_index(self, path: Path) -> None:
        expected = 0
        for start in range(0, len(self._lengths), _BLOCK):
            lengths = self._lengths[start : start + _BLOCK].astype(np.int64)
            if lengths.min() < 0:
                raise damaged(path, "it holds a negative length")
            ends = expected + np.cumsum(lengths) * self._dtype.itemsize
            offsets = self._places[start : start + _BLOCK]
            if offsets[0] != expected or not np.array_equal(offsets[1:], ends[:-1]):
                raise damaged(path, "its offsets do not match its lengths")
            expected = int(ends[-1])
        self._bytes = expected
        if self._documents[0] != 0 or self._documents[-1] != len(self._lengths):
            raise damaged(path, "its documents do not cover its sequences")
        for start in range(0, len(self), _BLOCK):
            if (np.diff(self._documents[start : start + _BLOCK + 1]) < 0).any():
                raise damaged(path, "its documents are not in order")


class DatatroveTokens(TokenFile):
    """A memory-mapped .ds file of datatrove and its index.

    The bytes per token follow from the sizes of the two files; the metadata must agree.
    """

    tokenizer: str | None = None
    """The tokenizer's name, if the metadata has it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        index = Path(f"{path}.index")
        _require_files((self.path, index), self.path)
        with readable():
            read_ends(index)
        self._ends = np.asarray(np.memmap(index, dtype="<u8", mode="r"))
        self._check_ends(index)
        size, count = self.path.stat().st_size, int(self._ends[-1])
        with readable():
            dtype = _DATATROVE_TYPES[bytes_a_token(self.path, index, size, count)]
        self.tokens = np.asarray(np.memmap(self.path, dtype=dtype, mode="r"))
        self._check_metadata(Path(f"{path}.metadata"))

    def __len__(self) -> int:
        return len(self._ends)

    def document_start(self, document: int) -> int:
        return int(self._ends[document - 1]) if document else 0

    def document_starts(self, start: int, stop: int) -> np.ndarray:
        first = self.document_start(start)
        return np.append(np.int64(first), self._ends[start:stop].astype(np.int64))

    def document_at(self, token: int) -> int:
        return bisect_right(self._ends, token)

    def _check_ends(self, index: Path) -> None:
        previous = np.zeros(1, dtype="<u8")
        for start in range(0, len(self._ends), _BLOCK):
            ends = self._ends[start : start + _BLOCK]
            if (np.append(previous, ends[:-1]) > ends).any():
                raise damaged(index, "its document ends are not in order")
            previous = ends[-1:]

    def _check_metadata(self, path: Path) -> None:
        if not path.is_file():
            return
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        self.tokenizer, _, size = (lines[0] if lines else "").partition("|")
        itemsize = self.tokens.dtype.itemsize
        if size.isdecimal() and int(size) != itemsize:
            what = f"it declares {size} bytes per token, and {self.path.name} has {itemsize}"
            raise damaged(path, what)
        if len(lines) > 1 and lines[1].isdecimal() and int(lines[1]) != len(self.tokens):
            what = f"it declares {lines[1]} tokens, and {self.path.name} has {len(self.tokens)}"
            raise damaged(path, what)


def open_answers(prefix: Path, file: TokenFile) -> np.ndarray:
    """Open the marks of answers: uint8 [tokens], mapped. Raises UserError if they belong to another file."""
    path = answers_of(prefix)
    size = path.stat().st_size if path.is_file() else None
    if size != len(file.tokens):
        content = "does not exist" if size is None else f"marks {size} tokens"
        raise damaged(path, f"{content}, and {file.path.name} has {len(file.tokens)}")
    return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))


@contextmanager
def readable() -> Iterator[None]:
    """Turn errors of opening and mapping files into a UserError."""
    try:
        yield
    except DamagedError as error:
        raise damaged(error.path, error.what, error.kind) from None


def damaged(path: Path, what: str, kind: str = "damaged token file") -> UserError:
    """Return the error for a damaged file."""
    violation = Violation(key="data.path", value=str(path), source="", message=what)
    return UserError("data", f"{kind}: {path}: {what}", [violation])


def _require_files(files: Iterable[Path], path: Path, hint: str = "") -> None:
    for file in files:
        if not file.is_file():
            violation = Violation("data.path", str(path), "", f"there is no such file{hint}")
            raise UserError("data", f"missing token file: {file}", [violation])
