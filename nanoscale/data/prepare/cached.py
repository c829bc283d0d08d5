"""Text files in place of token files: prepared once, into a folder of the cache."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from nanoscale.config.token_files import manifest
from nanoscale.data.prepare.chunks import Cursor, read_chunks
from nanoscale.data.prepare.preparation import (
    PreparationRequest,
    Watcher,
    identity_of,
    inputs_of,
    prepare,
)
from nanoscale.data.prepare.records import csv_header
from nanoscale.data.prepare.render import pair_in
from nanoscale.data.prepare.sources import Reading, TextSource, local_copy, opened


def prepare_in_cache(request: PreparationRequest, watcher: Watcher) -> Path:
    """Prepare a request into a folder of `request.out`, named after what determines its bytes; return it.

    Raises as `prepare` does.
    """
    reading, tokenizer = inputs_of(request)
    identity = json.dumps(identity_of(request, reading, tokenizer), sort_keys=True).encode()
    name = f"{Path(request.sources[0]).name}-{hashlib.sha256(identity).hexdigest()[:16]}"
    out = request.out / name
    if manifest(out) is None:
        prepare(replace(request, out=out), watcher)
    return out


def holds_chats(names: list[str] | None) -> bool:
    """True if a record of these fields, or a list, holds a chat and no text."""
    if names is None:
        return True
    return "text" not in names and (
        "messages" in names or "conversations" in names or pair_in(names) is not None
    )


def first_fields(source: TextSource) -> list[str] | None:
    """Return the names of the fields of a file's first record; None if it is a list itself."""
    # the preparation reports what is wrong
    with suppress(OSError, ValueError, LookupError), local_copy(source) as local:
        return _names_in(local)
    return []


def _names_in(source: TextSource) -> list[str] | None:
    if source.kind == "text":
        return []
    if source.kind == "parquet":
        from pyarrow import parquet

        return list(parquet.read_schema(source.copy or source.name).names)
    if source.kind == "csv":
        with opened(source) as (stream, _):
            return csv_header(stream)
    content = next(read_chunks(Reading((source,)), Cursor())).content
    first = content.split(b"\n", 1)[0] if isinstance(content, bytes) else content[0]
    record = json.loads(first or b"")
    return list(record) if isinstance(record, dict) else None
