"""The records of .json, .csv and .tar files, each as a JSON object, and records that cannot be prepared.

Records of preferences have a chosen and a rejected answer to the same question, or a good or bad one.
"""

import csv
import io
import json
import tarfile
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby, takewhile
from pathlib import PurePath
from typing import Any

from nanoscale.common.errors import UserError, Violation
from nanoscale.common.units import byte_size
from nanoscale.config.objectives import RECORDS
from nanoscale.data.prepare.render import (
    ATTACHED,
    NO_FIELD,
    TOOLS,
    VARIABLES,
    RecordError,
    messages_of,
    parsed,
)

PAIR = ("chosen", "rejected")
"""The fields of the answers: texts, or lists of messages, with or without the question's messages."""
LABEL = "label"
"""The field of a text's class, or of whether an answer is good."""
QUESTION = "prompt"
"""The field of the question: a text or a list of messages; it may be missing before whole conversations."""


def holds_pair(names: Container[str]) -> bool:
    """True if these are the fields of a record of preferences."""
    return all(name in names for name in PAIR)


def conversations(raw: bytes) -> list[bytes]:
    """Return the chosen and the rejected conversation, as JSON; answers that both share are not learned.

    Raises RecordError.
    """
    record = parsed(raw.decode())
    if not isinstance(record, dict) or not holds_pair(record):
        names = ", ".join(list(record)[:8]) if isinstance(record, dict) else "none"
        raise RecordError(f"has no fields 'chosen' and 'rejected'; its fields: {names}")
    question = _messages(record.get(QUESTION) or [], "user", QUESTION)
    chosen, rejected = (_messages(record[name], "assistant", name) for name in PAIR)
    if chosen == rejected:
        raise RecordError("has the same chosen and rejected answer")
    if isinstance(record[PAIR[0]], str) and not question:
        raise RecordError(
            f"has answers without a question; questions are in the field {QUESTION!r}"
        )
    both = zip(chosen, rejected, strict=False)
    shared = list(takewhile(lambda pair: pair[0] == pair[1], both))
    if len(shared) in (len(chosen), len(rejected)):
        raise RecordError("has no answer after the messages that both share")
    first = [
        message | {"train": False} if isinstance(message, dict) else message
        for message in question + chosen[: len(shared)]
    ]
    variables = {name: record[name] for name in (TOOLS, VARIABLES, *ATTACHED) if name in record}
    return [
        json.dumps(variables | {"conversations": first + answer[len(shared) :]}).encode()
        for answer in (chosen, rejected)
    ]


def rated(raw: bytes, field: str) -> tuple[list[bytes], int]:
    """Return the conversation, as JSON, and 1 for a good answer or 0 for a bad one; only what follows the last
    question is learned.

    Raises RecordError.
    """
    record = parsed(raw.decode())
    label = record.get(LABEL) if isinstance(record, dict) else None
    texts = {"true": 1, "1": 1, "false": 0, "0": 0}  # of a .csv
    sign = texts.get(label.lower()) if isinstance(label, str) else label
    if sign not in (0, 1):
        raise RecordError(
            f"its {LABEL!r} is neither true for a good answer nor false: {label!r:.40}"
        )
    messages = messages_of(record, field)
    last = max((i for i, it in enumerate(messages) if it["role"] != "assistant"), default=-1)
    first = [message | {"train": False} for message in messages[: last + 1]]
    variables = {name: record[name] for name in (TOOLS, VARIABLES, *ATTACHED) if name in record}
    conversation = variables | {"conversations": first + messages[last + 1 :]}
    return [json.dumps(conversation).encode()], int(sign)


def _messages(value: Any, role: str, name: str) -> list[Any]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list):
        raise RecordError(f"its field {name!r} is neither a text nor a list of messages")
    return value


EMPTY = "is empty"
SKIP = "skip them with --bad skip"
LONGEST = 32 << 20
"""The most bytes of one record: its tokens must fit into memory, many times over."""
_LONGEST_CELL = 1 << 30
"""The most characters of a cell, in place of Python's 131,072; records have a limit of their own."""


@dataclass(frozen=True)
class Bad:
    """A record, or the rest of a file, that is not a document."""

    place: str
    """`corpus/a.jsonl:17`, or `corpus/b.parquet, row 3`."""
    what: str


def bad_records_error(
    bad_records: Sequence[Bad], kept: str = "", *, nothing_else: bool = False, kind: str = "text"
) -> UserError:
    """Return the error for bad records; `bad_records` are the first of them.

    Args:
        kept: a clause on what was prepared before.
        nothing_else: True if no data would be left without them.
        kind: the kind of records that is expected, of `RECORDS`.
    """
    are_empty = all(bad.what == EMPTY for bad in bad_records)
    remedy = "name files with texts" if are_empty else "fix these records"
    remedy += "" if nothing_else else f", or {SKIP}"
    if kind != "text":
        remedy += f"; a record is as in {RECORDS[kind]}"
    elif any(bad.what.startswith(NO_FIELD) for bad in bad_records):
        remedy += (
            f"; a record is as in {RECORDS['text']}, and one of a chat as in {RECORDS['chat']}"
        )
    violations = [
        Violation(bad.place, None, "", bad.what, remedy="" if remaining else f"{remedy}{kept}")
        for remaining, bad in zip(range(len(bad_records) - 1, -1, -1), bad_records, strict=True)
    ]
    if len(bad_records) == 1:
        return UserError("data", f"{bad_records[0].place}: {bad_records[0].what}", violations)
    return UserError("data", f"{len(bad_records)} bad records", violations)


def json_records(stream: Any) -> Iterator[bytes]:
    """Yield the elements of a list; the whole file is in memory. Raises ValueError."""
    try:
        document = json.load(stream)
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error
    if not isinstance(document, list):
        raise ValueError("is not a list of records; if each line is one, name the file .jsonl")
    for record in document:
        yield json.dumps(record).encode()


def csv_records(stream: Any) -> Iterator[bytes | RecordError]:
    """Yield each row after the header as an object of texts. Raises ValueError."""
    rows = _rows(stream)
    names = next(rows, [])
    for row in rows:
        if not row:
            continue  # an empty line
        if len(row) == len(names):
            yield json.dumps(dict(zip(names, row, strict=True))).encode()
        else:
            yield RecordError(f"has {len(row)} values, and the header names {len(names)} columns")


def csv_header(stream: Any) -> list[str]:
    """Return the names of the columns. Raises ValueError."""
    return next(_rows(stream), [])


def _rows(stream: Any) -> Iterator[list[str]]:
    csv.field_size_limit(_LONGEST_CELL)
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
    try:
        yield from csv.reader(text, strict=True)
    except csv.Error as error:
        raise ValueError(f"is not CSV: {error}") from error
    finally:
        with suppress(ValueError):  # it is closed already
            text.detach()  # the caller closes the stream


def tar_records(stream: Any) -> Iterator[bytes | RecordError]:
    """Yield each sample of a WebDataset as one object. Raises ValueError.

    A sample is the files in a row whose paths are equal up to the first dot of the name. The record has the
    fields of its .json; its .txt becomes `text`, and its .cls `label`. Other files are left out.
    """
    try:
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            files = (member for member in archive if member.isfile())
            for _, members in groupby(files, key=lambda member: _sample_and_ending(member.name)[0]):
                yield _tar_record(archive, members)
    except (tarfile.TarError, EOFError) as error:
        raise ValueError(f"is not a whole tar file: {error}") from error


def _sample_and_ending(path: str) -> tuple[str, str]:
    name, _, rest = PurePath(path).name.partition(".")
    return str(PurePath(path).with_name(name or ".")), rest


def _tar_record(
    archive: tarfile.TarFile, members: Iterator[tarfile.TarInfo]
) -> bytes | RecordError:
    record: dict[str, Any] = {}
    endings, problem = [], ""
    for member in members:
        ending = _sample_and_ending(member.name)[1]
        endings.append(f".{ending}")
        if ending not in ("json", "txt", "cls"):
            continue
        if member.size > LONGEST:
            problem = f"its .{ending} is longer than {byte_size(LONGEST)}"
            continue
        file = archive.extractfile(member)
        assert file is not None, "it is a file"
        try:
            text = file.read().decode()
            value = json.loads(text) if ending == "json" else text
        except (ValueError, RecursionError) as error:
            problem = f"its .{ending} cannot be read: {error}"
            continue
        if ending != "json":
            record[{"txt": "text", "cls": "label"}[ending]] = value
        elif isinstance(value, dict):
            record |= value
        else:
            problem = "its .json is not an object"
    if not record and not problem:
        problem = f"holds {', '.join(endings)}, and no .txt or .json"
    return RecordError(problem) if problem else json.dumps(record).encode()


READERS: dict[str, Callable[[Any], Iterator[bytes | RecordError]]] = {
    "json": json_records,
    "csv": csv_records,
    "tar": tar_records,
}
"""The readers of files that hold records, by the kind of the file; each takes a stream of bytes."""
