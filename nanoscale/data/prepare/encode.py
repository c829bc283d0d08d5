"""One piece of text to tokens: what a worker does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from nanoscale.data.prepare.bad import Bad
from nanoscale.data.prepare.chunks import LONGEST, Chunk, separator_of, too_long
from nanoscale.data.prepare.sources import Source
from nanoscale.data.tokenizer import Tokenizer

_SPLIT_SEED = 7
_BATCH = 64


@dataclass(frozen=True)
class Reading:
    """How records become documents."""

    sources: tuple[Source, ...]
    field: str
    separator: str | None
    validation: float
    """share of the documents that is held out"""


@dataclass(frozen=True)
class Tokens:
    """Documents of one split."""

    tokens: bytes
    lengths: bytes
    """int32, tokens of each document"""


@dataclass(frozen=True)
class Encoded:
    """What became of one chunk."""

    train: Tokens
    valid: Tokens
    text_bytes: int
    """of the documents, as UTF-8"""
    empty: int
    """records that hold no text"""
    bad: tuple[Bad, ...]


class Documents:
    """The texts of a chunk, and what could not be one."""

    def __init__(self, chunk: Chunk, reading: Reading) -> None:
        self._chunk = chunk
        self._reading = reading
        self._source = reading.sources[chunk.source]
        self.bad = list(chunk.bad)
        self.empty = 0
        self.text_bytes = 0

    def __iter__(self) -> Iterator[tuple[str, bool]]:
        """Each text, and whether it is held out."""
        border = self._reading.validation * 2.0**64
        for record, raw in self._records():
            try:
                text = self._text(raw)
                encoded = text.encode()
            except _BadError as error:
                self.bad.append(Bad(self._source.place(record), str(error)))
            except UnicodeEncodeError:
                what = "holds half of a surrogate pair, which is no text"
                self.bad.append(Bad(self._source.place(record), what))
            else:
                if not text.strip():
                    self.empty += 1
                    continue
                self.text_bytes += len(encoded)
                # by the text alone, so that a copy of a document is never in the other split
                yield text, xxh3_64_intdigest(encoded, _SPLIT_SEED) < border

    def _records(self) -> Iterator[tuple[int, bytes | None]]:
        record, content = self._chunk.record, self._chunk.content
        if isinstance(content, list):
            yield from enumerate(content, record)
            return
        separator = separator_of(self._source, self._reading.separator)
        for raw in content.split(separator) if separator is not None else [content]:
            if raw.strip():
                yield record + _leading_lines(raw, self._source), raw
            record += raw.count(b"\n") + (separator.count(b"\n") if separator else 0)

    def _text(self, raw: bytes | None) -> str:
        if raw is None:
            raise _BadError("is null, not text")
        if len(raw) > LONGEST:
            separated = self._source.kind != "text" or self._reading.separator is not None
            raise _BadError(too_long(separated))
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            line = raw.count(b"\n", 0, error.start)
            where = f" in line {line + 1} of it" if line else ""
            raise _BadError(f"is not UTF-8: byte 0x{raw[error.start]:02x}{where}") from error
        return self._from_json(text) if self._source.kind == "jsonl" else text

    def _from_json(self, line: str) -> str:
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _BadError(f"is no JSON: {error}") from error
        if not isinstance(found, dict):
            raise _BadError("is JSON, but no object")
        field = self._reading.field
        if field not in found:
            names = ", ".join(list(found)[:8]) or "none"
            raise _BadError(f"has no field {field!r} (--field); its fields: {names}")
        text = found[field]
        if not isinstance(text, str):
            raise _BadError(f"its field {field!r} holds {_name(text)}, not text")
        return text


class _BadError(Exception):
    pass


def encode(chunk: Chunk, reading: Reading, tokenizer: Tokenizer, dtype: np.dtype[Any]) -> Encoded:
    """The tokens of a chunk's documents in their order, each with the end token."""
    documents = Documents(chunk, reading)
    both = list(documents)
    train, valid = (
        _tokens([text for text, is_held_out in both if is_held_out is side], tokenizer, dtype)
        for side in (False, True)
    )
    return Encoded(train, valid, documents.text_bytes, documents.empty, tuple(documents.bad))


def _tokens(texts: list[str], tokenizer: Tokenizer, dtype: np.dtype[Any]) -> Tokens:
    parts, lengths = [], []
    for ids in tokenizer.encode_documents(texts):
        parts.append(ids.astype(dtype).tobytes())
        lengths.append(len(ids))
    return Tokens(b"".join(parts), np.array(lengths, dtype="<i4").tobytes())


def _leading_lines(raw: bytes, source: Source) -> int:
    """Empty lines before a document: its place is where its text begins."""
    return raw[: len(raw) - len(raw.lstrip())].count(b"\n") if source.kind == "text" else 0


def _name(value: Any) -> str:
    names = {bool: "true or false", int: "a number", float: "a number", list: "a list"}
    return "null" if value is None else names.get(type(value), "an object")
