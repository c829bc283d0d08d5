"""Tokenizing chunks of text, in this process or in a pool."""

import json
import os
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from nanoscale.config.token_files import BAD
from nanoscale.data.prepare.chat import ChatTokenizer, Renderer
from nanoscale.data.prepare.chunks import Chunk, Cursor, read_chunks, too_long
from nanoscale.data.prepare.records import LABEL, LONGEST, READERS, Bad, conversations, rated
from nanoscale.data.prepare.render import Chat, RecordError, pair_in, parsed, value_at
from nanoscale.data.prepare.sources import Reading, TextSource
from nanoscale.data.tokens.tokenizer import ByteTokenizer, Tokenizer, load

JSON = ("jsonl", *READERS)
"""Kinds of sources whose records are JSON objects."""
_SPLIT_SEED = 7
_THREADS = "TOKENIZERS_PARALLELISM"


@dataclass(frozen=True)
class Tokens:
    """Documents of one split."""

    tokens: bytes
    lengths: bytes
    """int32, tokens of each document."""
    answers: bytes = b""
    """For chats and labels: one byte per token, 1 for tokens of an answer and for a label, BAD for tokens of a
    bad answer."""


@dataclass(frozen=True)
class Encoded:
    """The result of one chunk."""

    train: Tokens
    valid: Tokens
    text_bytes: int
    """Bytes of the documents, as UTF-8."""
    empty: int
    """Records that hold no text."""
    bad: tuple[Bad, ...]


class Documents:
    """The documents of a chunk, and its bad records."""

    def __init__(self, chunk: Chunk, reading: Reading, renderer: Renderer | None = None) -> None:
        """Read a chunk; `renderer` is needed if records are chats."""
        self._chunk = chunk
        self._reading = reading
        self._renderer = renderer
        self._source = reading.sources[chunk.source]
        self.bad = list(chunk.bad)
        self.empty = 0
        self.text_bytes = 0

    def __iter__(self) -> Iterator[tuple[Chat, bool]]:
        """Yield each document, a text as a chat without answers, and True if it is held out."""
        threshold = self._reading.validation * 2.0**64
        for record, result in self._read():
            if isinstance(result, RecordError):
                self.bad.append(Bad(self._source.place(record), str(result)))
                continue
            try:
                encoded = [chat.text.encode() for chat in result]
            except UnicodeEncodeError:
                what = "has half of a surrogate pair, which is not text"
                self.bad.append(Bad(self._source.place(record), what))
                continue
            if not result[0].text.strip():
                self.empty += 1
                continue
            self.text_bytes += sum(map(len, encoded))
            # The text alone decides, so that a copy of a document is never in the other split.
            held_out = xxh3_64_intdigest(encoded[0], _SPLIT_SEED) < threshold
            for chat in result:
                yield chat, held_out

    def records(self) -> Iterator[tuple[int, bytes | None]]:
        record, content = self._chunk.record, self._chunk.content
        if isinstance(content, list):
            yield from enumerate(content, record)
            return
        separator = self._reading.separator_of(self._source)
        for raw in content.split(separator) if separator is not None else [content]:
            if raw.strip():
                # The position of a document is its text's position, after empty lines.
                leading = (
                    raw[: len(raw) - len(raw.lstrip())] if self._source.kind == "text" else b""
                )
                yield record + leading.count(b"\n"), raw
            record += raw.count(b"\n") + (separator.count(b"\n") if separator else 0)

    def _read(self) -> Iterator[tuple[int, list[Chat] | RecordError]]:
        """Yield each record's text or both of a pair, for chats with the positions of answers, or its error."""
        if self._renderer is None:
            for record, raw in self.records():
                try:
                    yield record, [self._plain(raw)]
                except RecordError as error:
                    yield record, error
            return
        records = [(record, self._chats(raw)) for record, raw in self.records()]
        chats = [
            chat for _, found in records if not isinstance(found, RecordError) for chat in found[0]
        ]
        rendered = self._renderer.render(chats)
        for record, found in records:
            if isinstance(found, RecordError):
                yield record, found
                continue
            outcomes = [next(rendered) for _ in found[0]]
            errors = [outcome for outcome in outcomes if isinstance(outcome, RecordError)]
            texts = [replace(it, label=found[1]) for it in outcomes if isinstance(it, Chat)]
            yield record, errors[0] if errors else texts

    def _chats(self, raw: bytes | None) -> tuple[list[bytes], int | None] | RecordError:
        """Return a record's chats and the label of its answer, or its error."""
        try:
            chat = self._decoded(raw).encode()
            if self._reading.kind == "rated":
                return rated(chat, self._reading.field)
            return conversations(chat) if self._reading.kind == "pairs" else [chat], None
        except RecordError as error:
            return error

    def _plain(self, raw: bytes | None) -> Chat:
        text = self._decoded(raw)
        is_json = self._source.kind in JSON or self._reading.kind == "labels"
        return self._from_json(text) if is_json else Chat(text, ())

    def _decoded(self, raw: bytes | None) -> str:
        """Return the bytes of a record as text. Raises RecordError."""
        if raw is None:
            raise RecordError("is null, not text")
        if len(raw) > LONGEST:
            separated = self._source.kind != "text" or self._reading.separator is not None
            raise RecordError(too_long(separated))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            line = raw.count(b"\n", 0, error.start)
            where = f" in line {line + 1} of it" if line else ""
            what = f"is not UTF-8: byte 0x{raw[error.start]:02x}{where}"
            raise RecordError(what) from error

    def _from_json(self, line: str) -> Chat:
        record = parsed(line)
        if not isinstance(record, dict):
            raise RecordError("is JSON, but not an object")
        field = self._reading.field
        try:
            text = value_at(record, field)
        except RecordError as error:
            is_chat = "messages" in record or "conversations" in record or pair_in(record)
            hint = "; chats are prepared with --chat" if is_chat else ""
            raise RecordError(f"{error}{hint}") from error
        if not isinstance(text, str):
            names = {bool: "true or false", int: "a number", float: "a number", list: "a list"}
            names[type(None)] = "null"
            what = names.get(type(text), "an object")
            raise RecordError(f"its field {field!r} holds {what}, not text")
        return Chat(text, (), self._label(record) if self._reading.kind == "labels" else None)

    def _label(self, record: dict[str, Any]) -> int:
        label, count = record.get(LABEL), self._reading.labels
        if names := self._reading.label_names:
            if (label := _name_of(label)) not in names:
                raise RecordError(f"its {LABEL!r} is not the name of a class: {label!r:.40}")
            return names.index(label)
        label = _number_of(label, self._source)
        if type(label) is not int or not 0 <= label < count:
            raise RecordError(f"its {LABEL!r} is not an integer in [0, {count}): {label!r:.40}")
        return label


def _name_of(label: Any) -> Any:
    return json.dumps(label) if isinstance(label, bool) else label


def _number_of(label: Any, source: TextSource) -> Any:
    """Return a label, as a number if it is the text of one in a .csv, which has only texts."""
    is_text = source.kind == "csv" and isinstance(label, str) and label.isdecimal()
    return int(label) if is_text else label


def with_labels(reading: Reading, least: int) -> Reading:
    """Return a reading with the classes of its records, at least `least`: numbers, or names, which count in
    their sorted order."""
    reading, found = replace(reading, labels=max(2, least)), set[Any]()
    for chunk in read_chunks(reading, Cursor()):
        for _, raw in Documents(chunk, reading).records():
            with suppress(RecordError, ValueError, AttributeError):  # the preparation reports it
                label = parsed((raw or b"").decode()).get(LABEL)
                found.add(_number_of(label, reading.sources[chunk.source]))
    numbers = [label for label in found if type(label) is int]
    if numbers or not found - {None}:
        count = least or max((number + 1 for number in numbers), default=0)
        return replace(reading, labels=max(2, count))
    names = sorted(map(_name_of, found - {None}))
    return replace(reading, labels=max(reading.labels, len(names)), label_names=tuple(names))


@dataclass(frozen=True)
class Setup:
    """The settings that every process gets once.

    Processes and not the threads of the tokenizers library: parsing JSON and copying the tokens into Python
    then run on all cores too, and no cache is shared between them.
    """

    reading: Reading
    tokenizer: Path | None
    """A tokenizer.json; None for bytes."""
    dtype: np.dtype[Any]

    def load(self) -> Callable[[Chunk], Encoded]:
        """Return the function that tokenizes a chunk, for a process of its own."""
        os.environ[_THREADS] = "false"
        tokenizer = self.open()
        return lambda chunk: encode(chunk, self.reading, tokenizer, self.dtype)

    def open(self) -> Tokenizer | ChatTokenizer:
        if self.reading.template is not None:
            return ChatTokenizer(
                self.tokenizer, Renderer(self.reading.template, self.reading.field)
            )
        return load(self.tokenizer) if self.tokenizer else ByteTokenizer()


def encode_here(
    chunks: Iterator[Chunk], setup: Setup, stop: threading.Event
) -> Generator[tuple[Chunk, Encoded], None, None]:
    """Tokenize in this process alone, with the results of a pool."""
    tokenizer = setup.open()
    previous = os.environ.get(_THREADS)
    os.environ[_THREADS] = "false"
    try:
        for chunk in chunks:
            if stop.is_set():
                raise KeyboardInterrupt
            yield chunk, encode(chunk, setup.reading, tokenizer, setup.dtype)
    finally:
        if previous is None:
            del os.environ[_THREADS]
        else:
            os.environ[_THREADS] = previous
        if isinstance(tokenizer, ChatTokenizer):
            tokenizer.renderer.close()


def encode(
    chunk: Chunk, reading: Reading, tokenizer: Tokenizer | ChatTokenizer, dtype: np.dtype[Any]
) -> Encoded:
    """Tokenize a chunk's documents in order; texts get the end token or labels, chats stay as rendered."""
    renderer = tokenizer.renderer if isinstance(tokenizer, ChatTokenizer) else None
    documents = Documents(chunk, reading, renderer)
    both = list(documents)
    train, valid = (
        _tokens([chat for chat, held_out in both if held_out is side], tokenizer, dtype)
        for side in (False, True)
    )
    return Encoded(train, valid, documents.text_bytes, documents.empty, tuple(documents.bad))


def _tokens(
    chats: list[Chat], tokenizer: Tokenizer | ChatTokenizer, dtype: np.dtype[Any]
) -> Tokens:
    marks: list[bytes] = []
    documents: list[np.ndarray] = []
    if isinstance(tokenizer, ChatTokenizer):
        for chat, (ids, answers) in zip(chats, tokenizer.encode(chats), strict=True):
            documents.append(ids.astype(dtype))
            marks.append((answers * BAD if chat.label == 0 else answers).tobytes())
    else:
        has_labels = bool(chats) and chats[0].label is not None
        texts = [chat.text for chat in chats]
        documents = [ids.astype(dtype) for ids in tokenizer.encode_documents(texts, has_labels)]
        if has_labels:
            marks = [bytes(len(ids)) + b"\1" for ids in documents]
            documents = list(map(np.append, documents, (dtype.type(it.label) for it in chats)))
    lengths = np.array([len(ids) for ids in documents], dtype="<i4")
    tokens = b"".join(ids.tobytes() for ids in documents)
    return Tokens(tokens, lengths.tobytes(), b"".join(marks))
