"""Tokens on disk in the format of datatrove's DocumentTokenizer.

NAME.ds           every token, 2 or 4 bytes each, unsigned, little-endian
NAME.ds.index     the end of each document, in tokens: u64
NAME.ds.metadata  lines: the tokenizer, in newer files with `|` and the bytes of a token; the tokens
"""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path
from typing import Any

import numpy as np

from nanoscale.common.errors import UserError, Violation
from nanoscale.config.data.token_headers import bytes_a_token, read_ends
from nanoscale.data.tokens.indexed import damaged, readable

_BLOCK = 1 << 20
_TYPES: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}


class DatatroveTokens:
    """A memory-mapped .ds file and its index, checked when opened; `len` is the number of documents.

    The bytes per token follow from the sizes of the two files; the metadata must agree. Raises UserError
    naming the file that is missing, truncated or of another data set.
    """

    tokens: np.ndarray
    """Every token of the file one after the other, 1-D, mapped, read-only."""
    tokenizer: str | None = None
    """The tokenizer's name, if the metadata has it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        index = Path(f"{path}.index")
        for file in (self.path, index):
            if not file.is_file():
                violation = Violation("data.path", str(path), "", "there is no such file")
                raise UserError("data", f"missing token file: {file}", [violation])
        with readable():
            read_ends(index)
        self._ends = np.asarray(np.memmap(index, dtype="<u8", mode="r"))
        self._check_ends(index)
        self.tokens = self._map(index)
        self._check_metadata(Path(f"{path}.metadata"))

    def __len__(self) -> int:
        return len(self._ends)

    def document_start(self, document: int) -> int:
        """Return a document's start in `tokens`; for `len(self)`, the end of the last document."""
        return int(self._ends[document - 1]) if document else 0

    def document_starts(self, start: int, stop: int) -> np.ndarray:
        """Return the starts of documents [start, stop) in `tokens`, and the end of the last: int64."""
        first = self.document_start(start)
        return np.append(np.int64(first), self._ends[start:stop].astype(np.int64))

    def document_at(self, token: int) -> int:
        """Return the number of the document that holds the token at this position."""
        return bisect_right(self._ends, token)

    def __getitem__(self, document: int) -> np.ndarray:
        """Return the tokens of one document, 1-D."""
        if not 0 <= document < len(self):
            raise IndexError(document)
        return self.tokens[self.document_start(document) : self.document_start(document + 1)]

    def _check_ends(self, index: Path) -> None:
        previous = np.zeros(1, dtype="<u8")
        for start in range(0, len(self._ends), _BLOCK):
            ends = self._ends[start : start + _BLOCK]
            if (np.append(previous, ends[:-1]) > ends).any():
                raise damaged(index, "its document ends are not in order")
            previous = ends[-1:]

    def _map(self, index: Path) -> np.ndarray:
        size, count = self.path.stat().st_size, int(self._ends[-1])
        with readable():
            dtype = _TYPES[bytes_a_token(self.path, index, size, count)]
        return np.asarray(np.memmap(self.path, dtype=dtype, mode="r"))

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
