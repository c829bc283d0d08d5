"""Reading sources in chunks of whole records, from any position, in constant memory.

This module does not parse records: workers do. The borders of chunks follow from the sources alone, also for a
reader that starts at a border, and every document is tokenized alone.
"""

import json
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from nanoscale.common.units import byte_size
from nanoscale.data.prepare.records import EMPTY, LONGEST, READERS, Bad
from nanoscale.data.prepare.render import RecordError
from nanoscale.data.prepare.sources import (
    Reading,
    TextSource,
    columns_of,
    dataset,
    first_line,
    inner_names,
    local_copy,
    opened,
    problem,
)

CHUNK = 1 << 19
"""The least bytes of text that a worker gets at a time."""

_ROWS = 128
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Cursor:
    """A position in the sources, between two records."""

    source: int = 0
    offset: int = 0
    """Bytes of the uncompressed text, or rows of a table."""
    record: int = 1
    """The number of the next line or row."""


@dataclass(frozen=True)
class Chunk:
    """Whole records of one source."""

    source: int
    record: int
    """The line or row of the first record."""
    content: bytes | list[bytes | None]
    """Text with its separators, or the cells of a column."""
    after: Cursor
    read: int
    """The source's bytes that are read so far."""
    bad: tuple[Bad, ...] = ()
    """Records that could not be read."""


def read_chunks(reading: Reading, start: Cursor) -> Generator[Chunk, None, None]:
    """Yield all records of the sources from `start` on."""
    for number, source in enumerate(reading.sources[start.source :], start.source):
        cursor = start if number == start.source else Cursor(number)
        last = cursor
        try:
            with local_copy(source) as local:
                bad = problem(local, reading)
                if bad is not None:
                    raise _DamageError(bad)
                for chunk in _chunks_of(local, cursor, reading):
                    last = chunk.after
                    yield chunk
        except _DamageError as error:
            yield _unreadable(number, source, error.bad)
        except (OSError, ValueError) as error:  # pyarrow's are among these
            what = f"cannot be read from here on: {first_line(error)}"
            yield _unreadable(number, source, Bad(source.place(last.record), what))


def _chunks_of(source: TextSource, start: Cursor, reading: Reading) -> Iterator[Chunk]:
    if source.kind in ("text", "jsonl"):
        return _text_chunks(source, start, reading.separator_of(source))
    if source.kind in READERS:
        return _record_chunks(source, start)
    return _table_chunks(source, start, reading)


class _DamageError(Exception):
    def __init__(self, bad: Bad) -> None:
        super().__init__(bad.what)
        self.bad = bad


def _unreadable(number: int, source: TextSource, bad: Bad) -> Chunk:
    """Return an empty chunk that reports an unreadable record."""
    return Chunk(number, 1, b"", Cursor(number + 1), source.bytes, (bad,))


def _text_chunks(source: TextSource, start: Cursor, separator: bytes | None) -> Iterator[Chunk]:
    cursor = start
    with opened(source) as (stream, raw):
        _skip(stream, start.offset)
        # The blocks that are read end at the same offsets from every start.
        first = CHUNK - start.offset % CHUNK
        for content, length, lines in _whole_records(stream, separator, first):
            after = Cursor(start.source, cursor.offset + length, cursor.record + lines)
            bad: tuple[Bad, ...] = ()
            if not content:
                bad = (Bad(source.place(cursor.record), too_long(separator is not None)),)
            text = content.removeprefix(_BOM) if cursor.offset == 0 else content
            yield Chunk(start.source, cursor.record, text, after, raw.tell(), bad)
            cursor = after
    if cursor.offset == 0:
        raise _DamageError(Bad(source.name, EMPTY))


def _whole_records(
    stream: Any, separator: bytes | None, first: int
) -> Iterator[tuple[bytes, int, int]]:
    """Yield whole records with their separators, their bytes and their numbers of line ends.

    For a record that is too long the text is empty; the two numbers are right. `first`: the bytes of the first
    block, after which blocks have CHUNK bytes.
    """
    buffer, block = b"", stream.read(first)
    while block:
        buffer += block
        # Separators count from the left, as in a split of the whole text: one may overlap itself.
        end = len(buffer) - len(buffer.split(separator)[-1]) if separator else 0
        if end:
            yield buffer[:end], end, buffer.count(b"\n", 0, end)
            buffer = buffer[end:]
        elif len(buffer) > LONGEST:
            length, lines, buffer = _skip_long_record(stream, buffer, separator)
            yield b"", length, lines
        block = stream.read(CHUNK)
    if buffer:
        yield buffer, len(buffer), buffer.count(b"\n")


def _skip_long_record(
    stream: Any, buffer: bytes, separator: bytes | None
) -> tuple[int, int, bytes]:
    """Read to the end of the record of `buffer`; return its bytes, its line ends, and the text after it."""
    length = lines = 0
    overlap = len(separator) - 1 if separator else 0
    while separator is None or separator not in buffer:
        passed = buffer[: len(buffer) - overlap]
        length, lines = length + len(passed), lines + passed.count(b"\n")
        block = stream.read(CHUNK)
        if not block:
            return length + overlap, lines + buffer.count(b"\n", len(passed)), b""
        buffer = buffer[len(passed) :] + block
    end = buffer.index(separator) + len(separator)
    return length + end, lines + buffer.count(b"\n", 0, end), buffer[end:]


def too_long(separated: bool) -> str:
    """Describe a record longer than LONGEST."""
    what = f"this document is longer than {byte_size(LONGEST)}"
    return what if separated else f"{what}; --separator TEXT sets the text between documents"


def _skip(stream: Any, offset: int) -> None:
    if stream.seekable():
        stream.seek(offset)
        return
    while offset:
        offset -= len(stream.read(min(offset, CHUNK)))


def _record_chunks(source: TextSource, start: Cursor) -> Iterator[Chunk]:
    """Yield the records of a kind of `READERS` in chunks of about CHUNK bytes; a bad one ends its chunk."""
    read = READERS[source.kind]
    cells: list[bytes | None] = []
    begin, size, number = start.record, 0, start.source
    with opened(source) as (stream, raw):
        for record in islice(read(stream), start.offset, None):
            bad: tuple[Bad, ...] = ()
            row = begin + len(cells)
            if isinstance(record, RecordError):
                bad = (Bad(source.place(row), str(record)),)
            else:
                cells.append(record)
                size += len(record)
            if bad or size >= CHUNK:
                yield Chunk(number, begin, cells, Cursor(number, row, row + 1), raw.tell(), bad)
                begin, cells, size = row + 1, [], 0
        end = begin + len(cells)
        if end == 1:
            raise _DamageError(Bad(source.name, EMPTY))
        if cells:
            yield Chunk(number, begin, cells, Cursor(number, end - 1, end), source.bytes)


def _table_chunks(source: TextSource, start: Cursor, reading: Reading) -> Iterator[Chunk]:
    """Yield records in chunks of about CHUNK bytes."""
    row, cells, size = start.offset, [], 0
    read = _parquet_batches if source.kind == "parquet" else _dataset_batches
    rows, batches = read(source, row, reading)
    for batch in batches:
        batch_cells = _bytes_of(batch)
        cells += batch_cells
        # Cells that share a dictionary's text are longer together than their column.
        size += max(batch.nbytes, sum(len(cell) for cell in batch_cells if cell))
        if size >= CHUNK:
            yield _table_chunk(source, Cursor(start.source, row, row + 1), cells, rows)
            row, cells, size = row + len(cells), [], 0
    if cells:
        yield _table_chunk(source, Cursor(start.source, row, row + 1), cells, rows)


def _bytes_of(column: Any) -> list[bytes | None]:
    """Return the cells as bytes, since a file may hold text that is not UTF-8; values other than text as
    JSON."""
    import pyarrow as pa

    if pa.types.is_nested(column.type):
        cells = column.to_pylist()
        return [
            None if cell is None else json.dumps(_unpadded(cell), default=_as_text).encode()
            for cell in cells
        ]
    return column.cast(pa.large_binary()).to_pylist()


def _unpadded(value: Any) -> Any:
    """Return a value without nulls in its objects, which have the fields of all objects of their column."""
    if isinstance(value, list):
        return list(map(_unpadded, value))
    if not isinstance(value, dict):
        return value
    return {name: _unpadded(inner) for name, inner in value.items() if inner is not None}


def _as_text(value: Any) -> str:
    """Return a value that JSON has no type for as text: a date and a time by ISO 8601, bytes as UTF-8.

    Bytes that are not UTF-8 become halves of surrogate pairs, so that a document with them is a bad record.
    """
    if isinstance(value, bytes):
        return value.decode(errors="surrogateescape")
    return str(value.isoformat()) if hasattr(value, "isoformat") else str(value)


def _table_chunk(source: TextSource, start: Cursor, cells: list[bytes | None], rows: int) -> Chunk:
    end = start.offset + len(cells)
    after = Cursor(start.source, end, end + 1)
    return Chunk(start.source, start.record, cells, after, source.bytes * end // rows)


def _record_column(batch: Any, schema: Any, field: str) -> Any:
    """Return the records of a batch as one column: the field's, or objects of all columns."""
    from pyarrow import compute

    if batch.num_columns > 1:
        return batch.to_struct_array()
    column = batch.column(0)
    for name in inner_names(schema, field):
        column = compute.struct_field(column, name)
    return column


def _parquet_batches(source: TextSource, start: int, reading: Reading) -> tuple[int, Iterator[Any]]:
    """Return the number of rows, and the records from row `start` on; pages are read one after the other."""
    from pyarrow import parquet

    file = parquet.ParquetFile(
        source.copy or source.name,
        buffer_size=CHUNK,
        pre_buffer=False,
        page_checksum_verification=True,
    )
    schema = file.schema_arrow
    groups = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
    batches = _rows_from(file, groups, start, columns_of(schema, reading))
    return sum(groups), (_record_column(batch, schema, reading.field) for batch in batches)


def _rows_from(file: Any, groups: list[int], start: int, columns: list[str]) -> Iterator[Any]:
    with file:
        for group, rows in enumerate(groups):
            if start >= rows:
                start -= rows
                continue
            # one group at a time: batches then begin at the same rows from every start
            for batch in file.iter_batches(
                _ROWS, row_groups=[group], columns=columns, use_threads=False
            ):
                skipped = min(start, len(batch))
                start -= skipped
                if skipped < len(batch):
                    yield batch[skipped:]


def _dataset_batches(source: TextSource, start: int, reading: Reading) -> tuple[int, Iterator[Any]]:
    schema = dataset(source.name).data.schema
    columns = columns_of(schema, reading)
    table = dataset(source.name).select_columns(columns).with_format("arrow")
    rows = len(table)
    batches = (
        batch
        for row in range(start, rows, _ROWS)
        for batch in table[row : row + _ROWS].combine_chunks().to_batches()
    )
    return rows, (_record_column(batch, schema, reading.field) for batch in batches)
