"""Tokens on disk, in documents, mapped and checked when opened (`config.token_formats`)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from nanoscale.common.errors import UserError, Violation
from nanoscale.config.token_files import answers_of
from nanoscale.config.token_formats import (
    FORMATS,
    HEADER,
    MAGIC,
    MEGATRON_TYPES,
    VERSION,
    DamagedError,
    TokenIndex,
)

_CODES = {np.dtype(letter): code for code, letter in MEGATRON_TYPES.items()}
_BLOCK = 1 << 20


def bin_path(prefix: str | Path) -> Path:
    """Return the file of tokens of a prefix; the prefix may hold dots itself."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.idx")


def index_parts(dtype: np.dtype[Any], lengths: np.ndarray) -> Iterator[bytes]:
    """Yield the `.idx` of documents of these lengths (int32 [documents], perhaps mapped), in chunks."""
    count = len(lengths)
    starts = range(0, count, _BLOCK)
    yield HEADER.pack(MAGIC, VERSION, _CODES[dtype.newbyteorder("=")], count, count + 1)
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


class TokenFile:
    """Tokens on disk, in documents; `len` is the number of documents. The whole index is checked, and no token.

    Raises DamagedError.
    """

    def __init__(self, index: TokenIndex) -> None:
        self.index = index
        self.path = index.path
        """The file of tokens."""
        self._ends = np.asarray(index.ends)
        self._check_ends()
        if index.documents is not None:
            for start in range(0, len(self), _BLOCK):
                if (np.diff(index.documents[start : start + _BLOCK + 1]) < 0).any():
                    raise DamagedError(index.index, "its documents are not in order")
        self.tokens = np.asarray(
            np.memmap(self.path, index.letter, "r", offset=index.offset, shape=(index.count,))
        )
        """Every token of the file one after the other, 1-D, mapped, read-only. A plain array over the mapping:
        np.memmap's own slicing costs microseconds."""

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, document: int) -> np.ndarray:
        """Return the tokens of one document, 1-D."""
        if not 0 <= document < len(self):
            raise IndexError(document)
        return self.tokens[slice(*self.document_starts(document, document + 1))]

    def document_starts(self, start: int, stop: int) -> np.ndarray:
        """Return the starts of documents [start, stop) in `tokens`, and the end of the last: int64."""
        texts = np.arange(start, stop + 1)
        if self.index.documents is not None:
            texts = np.asarray(self.index.documents[start : stop + 1])
        starts = np.where(texts > len(self._ends), self.index.count, 0)
        is_stored = (texts > 0) & (texts <= len(self._ends))
        starts[is_stored] = self._ends[texts[is_stored] - 1] // self.index.unit
        return starts

    def _check_ends(self) -> None:
        """Check that the ends are in order, and match the lengths if these are stored."""
        lengths, previous = self.index.lengths, 0
        for start in range(0, len(self._ends if lengths is None else lengths), _BLOCK):
            ends = self._ends[start : start + _BLOCK].astype(np.int64)
            if lengths is None:
                if (np.diff(ends, prepend=previous) < 0).any():
                    raise DamagedError(self.index.index, "its document ends are not in order")
                previous = int(ends[-1])
                continue
            steps = np.asarray(lengths[start : start + _BLOCK]).astype(np.int64)
            if steps.min() < 0:
                raise DamagedError(self.index.index, "it holds a negative length")
            expected = previous + np.cumsum(steps) * self.index.unit
            if not np.array_equal(ends, expected[: len(ends)]):
                raise DamagedError(self.index.index, "its offsets do not match its lengths")
            previous = int(expected[-1])


def open_tokens(source: str, path: str | Path, eos: int = 0) -> TokenFile:
    """Open the tokens of a `data.source` and a `data.path`.

    Raises UserError naming the file that is missing, truncated, of another data set or not of this format.
    """
    form = FORMATS[source]
    if missing := form.missing(str(path)):
        hint = "" if "" in form.files else f" (the path is given without {' or '.join(form.files)})"
        violation = Violation("data.path", str(path), "", f"there is no such file{hint}")
        raise UserError("data", f"missing token file: {missing[0]}", [violation])
    try:
        return TokenFile(form.read(str(path), eos))
    except DamagedError as error:
        raise damaged(error.path, error.what, error.kind) from None


def open_answers(prefix: Path, file: TokenFile) -> np.ndarray:
    """Open the marks of answers: uint8 [tokens], mapped. Raises UserError if they belong to another file."""
    path = answers_of(prefix)
    size = path.stat().st_size if path.is_file() else None
    if size != len(file.tokens):
        content = "does not exist" if size is None else f"marks {size} tokens"
        raise damaged(path, f"{content}, and {file.path.name} has {len(file.tokens)}")
    return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))


def damaged(path: Path, what: str, kind: str = "damaged token file") -> UserError:
    violation = Violation(key="data.path", value=str(path), source="", message=what)
    return UserError("data", f"{kind}: {path}: {what}", [violation])
