"""Text files in place of token files, prepared once into a folder of the cache: whole before the training, or
beside it, as a folder of parts that appear one after the other.

    NAME.parts/             request.json  manifest.json  tokenizer.json …  lock
    NAME.parts/part-00000/  tokens.bin  tokens.idx  valid.bin …  a prepared folder
    NAME.parts/all.json     written after the last part: their number

A part ends with the first chunk of text after which it has PART bytes, so all bytes follow from the sources and
the settings, not from interruptions. A part that was interrupted is prepared again. The first part refuses bad
records; later parts leave them out.
"""

import fcntl
import hashlib
import json
import os
import shutil
import sys
import uuid
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from nanoscale.common.errors import UserError
from nanoscale.common.json_text import Json, parse
from nanoscale.common.units import counted
from nanoscale.config.token_files import ALL_PARTS, MANIFEST, REFUSED, TEMPLATE, TOKENIZER, manifest
from nanoscale.config.token_formats import PARTS, part_of
from nanoscale.data.prepare import preparation
from nanoscale.data.prepare.chunks import Chunk, Cursor, read_chunks
from nanoscale.data.prepare.encode import Setup
from nanoscale.data.prepare.folder import UnfinishedFolder, write_document
from nanoscale.data.prepare.records import csv_header
from nanoscale.data.prepare.render import pair_in
from nanoscale.data.prepare.sources import DATASET, Reading, TextSource, local_copy, opened
from nanoscale.data.tokens.files import smallest_type
from nanoscale.data.tokens.tokenizer import Tokenizer
from nanoscale.processes.lifeline import die_with
from nanoscale.processes.pool import LostProcessError
from nanoscale.processes.scratch import flock

PART = 64 << 20
"""The least bytes of text of a part: some seconds of work."""
_REQUEST = "request.json"
_NICENESS = 10


def prepare_in_cache(request: preparation.PreparationRequest, watcher: preparation.Watcher) -> Path:
    """Prepare a request into a folder of `request.out`, named after what determines its bytes; return it.

    Raises as `preparation.prepare` does.
    """
    reading, tokenizer = preparation.inputs_of(request)
    out = _named(request, preparation.identity_of(request, reading, tokenizer))
    if manifest(out) is None:
        preparation.prepare(replace(request, out=out), watcher)
    return out


def prepare_first(request: preparation.PreparationRequest, watcher: preparation.Watcher) -> Path:
    """Prepare the first part of the sources, in a folder of `request.out`; return the folder.

    Its name follows from what determines its bytes. Raises as `preparation.prepare` does.
    """
    reading, tokenizer = _inputs_of(request)
    identity = preparation.identity_of(request, reading, tokenizer) | {"part": PART}
    folder = _named(request, identity, PARTS)
    if part_of(folder, 0).is_dir():
        return folder
    with _locked(folder), preparation.interrupted() as stop:
        if not part_of(folder, 0).is_dir():  # another process was faster
            job = preparation.Preparation(request, reading, tokenizer, watcher, stop)
            tokenizer = preparation.write_tokenizer(job, folder)
            write_document(folder / _REQUEST, asdict(request) | {"out": str(request.out)})
            parts = _Parts(folder, job, tokenizer, identity)
            with closing(parts.write()) as published:
                next(published, None)
    return folder


def _named(request: preparation.PreparationRequest, identity: object, ending: str = "") -> Path:
    """Return the folder whose name follows from what determines its bytes."""
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    return request.out / f"{Path(request.sources[0]).name}-{digest}{ending}"


def prepare_rest(folder: Path, workers: int, report: Callable[[str], None]) -> None:
    """Prepare the parts that a folder lacks, unless it has all; `report` gets sentences for people.

    Raises:
        UserError: the sources have changed, or cannot be read any more.
        LostProcessError: a worker was killed.
    """
    with _locked(folder):  # another training may prepare the same texts
        request, reading, tokenizer, identity = _reopened(folder)
        request = replace(request, workers=workers, skip_bad=True)
        job = preparation.Preparation(request, reading, tokenizer)
        parts = _Parts(folder, job, tokenizer, identity)
        for number, progress in parts.write():
            for bad in progress.shown[:1]:
                left_out = counted(progress.bad, "bad record")
                report(f"{left_out} of part {number} left out, first {bad.place} {bad.what}")
        report(f"all texts are prepared, in {counted(parts.number, 'part')}")


def _reopened(folder: Path) -> tuple[preparation.PreparationRequest, Reading, Tokenizer, Json]:
    """Return a folder's request with its own tokenizer. Raises UserError if a source has changed."""
    identity = (manifest(folder) or {})["request"]
    tokenizer, template = folder / TOKENIZER, folder / TEMPLATE
    stored = parse((folder / _REQUEST).read_bytes())
    if "chat" in stored:  # a folder that was begun before 2026-11-28
        stored["kind"] = "chat" if stored.pop("chat") else "text"
        del stored["pairs"]
    request = preparation.PreparationRequest(**stored | {
        "sources": tuple(stored["sources"]),
        "out": Path(stored["out"]),
        "tokenizer": str(tokenizer) if tokenizer.is_file() else "byte",
        "chat_template": template if template.is_file() else None,
    })  # fmt: skip
    reading, opened = _inputs_of(request)
    assert opened is not None, "it was written"
    if [source.document() for source in reading.sources] != identity["sources"]:
        raise UserError(
            "data", f"the texts of {folder.name} have changed: start a new run with them"
        )
    return request, reading, opened, identity


class _Parts:
    """The parts of a folder, from the first missing one on."""

    def __init__(
        self, folder: Path, job: preparation.Preparation, tokenizer: Tokenizer, identity: Json
    ) -> None:  # fmt: skip
        self._folder, self._job = folder, job
        self._tokenizer, self._identity = tokenizer, identity
        self.number = 0
        while part_of(folder, self.number).is_dir():
            self.number += 1
        self._sizes = [source.bytes for source in job.reading.sources]
        self._first = min(sum(self._sizes), identity["part"])

    def write(self) -> Generator[tuple[int, Any], None, None]:
        """Write the missing parts; yield the number and the progress of each when it is published."""
        if (self._folder / ALL_PARTS).is_file():
            return
        file, job = self._folder / TOKENIZER, self._job
        dtype = smallest_type(self._tokenizer.vocab_size)
        setup = Setup(job.reading, file if file.is_file() else None, dtype)
        chunks = read_chunks(job.reading, self._start())
        encoding = preparation.encoding(job.request.workers, chunks, setup, job.stop)
        with closing(chunks), encoding as results:
            part, size = self._new(dtype), 0
            for chunk, encoded in results:
                part.add(chunk, encoded)
                preparation.refuse_bad(part.progress, job.request)
                job.watcher.progress(part.progress, self._first)
                size += _size(chunk)
                if size >= self._identity["part"] and part.progress.train.documents:
                    yield self._publish(part)
                    part, size = self._new(dtype), 0
        if part.progress.train.documents:
            yield self._publish(part)
        if self.number == 0:
            raise UserError("data", "the sources hold no document to train on")
        write_document(self._folder / ALL_PARTS, {"parts": self.number})

    def _start(self) -> Cursor:
        """Return the position after the last part."""
        if self.number == 0:
            return Cursor()
        last = manifest(part_of(self._folder, self.number - 1)) or {}
        return Cursor(**last["after"])

    def _new(self, dtype: Any) -> UnfinishedFolder:
        temporary = self._folder / f".{uuid.uuid4().hex}"
        (temporary / "whole").mkdir(parents=True)
        return UnfinishedFolder(temporary, dtype, self._sizes, self._job.request.is_chat)

    def _publish(self, part: UnfinishedFolder) -> tuple[int, Any]:
        number, progress = self.number, part.progress
        found = preparation.manifest_of(self._identity, self._tokenizer, self._folder, progress)
        if number == 0:
            of_all = {"read": progress.read, "bytes": sum(self._sizes)}
            write_document(self._folder / MANIFEST, found | of_all)
        of_part = {name: value for name, value in found.items() if name != "request"}
        of_part["after"] = asdict(progress.cursor)
        part.publish(part_of(self._folder, number), of_part, sums=True)
        self.number += 1
        return number, progress


def _size(chunk: Chunk) -> int:
    content = chunk.content
    return len(content) if isinstance(content, bytes) else sum(len(it) for it in content if it)


def _inputs_of(request: preparation.PreparationRequest) -> tuple[Reading, Tokenizer | None]:
    reading, tokenizer = preparation.inputs_of(request)
    return replace(reading, sources=_mixed(reading.sources)), tokenizer


def _mixed(sources: tuple[TextSource, ...]) -> tuple[TextSource, ...]:
    """Return the sources in an order that mixes them, which follows from their names below a common folder."""
    names = [source.name for source in sources]
    is_tree = len(names) > 1 and not names[0].startswith(DATASET)
    root = len(os.path.commonpath(names)) if is_tree else 0
    keys = {name: hashlib.sha256(name[root:].encode()).digest() for name in names}
    return tuple(sorted(sources, key=lambda source: keys[source.name]))


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a folder within the body; what an earlier process left unfinished is removed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("a", encoding="utf-8") as lock:
            flock(lock.fileno(), fcntl.LOCK_EX)
            for left in folder.glob(".*"):
                shutil.rmtree(left, ignore_errors=True)
            yield
    except OSError as error:
        raise UserError("data", f"{folder} cannot be written: {error.strerror or error}") from error


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


def main() -> int:
    """Prepare the rest of a folder for the launcher that has started this process, and end with it.

    The last line that it prints says why the rest cannot be prepared.
    """
    folder, workers, launcher = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    die_with(launcher, group=os.getpgid(0))
    os.nice(_NICENESS)
    while True:
        try:
            prepare_rest(folder, workers, lambda sentence: print(sentence, flush=True))
            return 0
        except LostProcessError as error:  # most often memory ran out
            if workers == 1:
                why, code = f"a worker ended by {error}", 1
                break
            workers //= 2
        except UserError as error:  # a full disk is not a wrong request
            why, code = str(error), 1 if isinstance(error.__cause__, OSError) else REFUSED
            break
    print(f"the rest of the texts cannot be prepared: {why}", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
