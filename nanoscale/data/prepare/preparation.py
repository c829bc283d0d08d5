"""Preparing a folder of tokens from a request."""

import hashlib
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from nanoscale.common.errors import UserError, Violation
from nanoscale.common.json_text import Json
from nanoscale.config.token_files import TEMPLATE, TOKENIZER, manifest
from nanoscale.data.prepare import folder
from nanoscale.data.prepare.chat import PLAIN, find_template
from nanoscale.data.prepare.chunks import Chunk, Cursor, read_chunks
from nanoscale.data.prepare.encode import Documents, Encoded, Setup, encode_here, with_labels
from nanoscale.data.prepare.folder import PreparationProgress, UnfinishedFolder
from nanoscale.data.prepare.records import bad_records_error
from nanoscale.data.prepare.sources import CHATS, Reading, RecordKind, find_sources, problem
from nanoscale.data.tokens import tokenizer as tokenizers
from nanoscale.data.tokens.files import smallest_type
from nanoscale.processes.pool import Pool

FORMAT = 1
"""Raised whenever the same request would give other bytes."""

COMMIT_S = 5.0
"""The least time between two commits."""
_SAMPLE = 256 << 20
_MOST_SHOWN = 10


@dataclass(frozen=True)
class PreparationRequest:
    """A request to prepare data."""

    sources: tuple[str, ...]
    """Files, folders, patterns, hf:NAME."""
    out: Path
    tokenizer: str | None
    """byte, a tokenizer.json, its folder or a name of the hub; None: a BPE is trained."""
    vocab_size: int = 32768
    """The most tokens of a BPE that is trained."""
    eos: str | None = None
    """The end-of-document token, if the tokenizer does not name one."""
    field: str = "text"
    separator: str | None = None
    """The separator of documents in a .txt; None: each file is one document."""
    validation: float = 0.0
    """The share of the documents that is held out."""
    skip_bad: bool = False
    kind: RecordKind = "text"
    """Texts and messages are in `field`."""
    chat_template: Path | None = None
    """A file that replaces the tokenizer's own template."""
    workers: int = 1
    labels: int | None = None
    """The number of classes of texts with labels; None: as many as the records have."""

    @property
    def is_chat(self) -> bool:
        """True if a template renders its records."""
        return self.kind in CHATS


class Watcher(Protocol):
    """A receiver of progress reports, which ignores them by default."""

    def note(self, sentence: str) -> None: ...

    def progress(self, progress: PreparationProgress, total: int) -> None:
        """Report progress: `progress.read` of the `total` bytes of all sources are read."""


class Silent(Watcher):
    """A receiver that ignores all reports."""


@dataclass(frozen=True)
class Preparation:
    """A request with its sources and its tokenizer, and the work on it."""

    request: PreparationRequest
    reading: Reading
    tokenizer: tokenizers.Tokenizer | None
    """None: it is trained on the sources."""
    watcher: Watcher = field(default_factory=Silent)
    stop: threading.Event = field(default_factory=threading.Event)
    """Once it is set, the work is interrupted after the current chunk."""


def prepare(request: PreparationRequest, watcher: Watcher) -> Json:
    """Tokenize the sources into the folder `request.out` and return its manifest.

    The bytes depend on sources, tokenizer and settings alone, not on the number of workers nor on
    interruptions: the same request resumes at its last commit. Memory is bounded by the longest document times
    the workers.

    Raises:
        UserError: the request is wrong, or a record is bad and `skip_bad` is false.
        KeyboardInterrupt: by Ctrl-C, after a commit.
        LostProcessError: a worker was killed.
    """
    request = replace(request, out=request.out.expanduser().absolute())
    reading, tokenizer = inputs_of(request)
    identity = identity_of(request, reading, tokenizer)
    finished = manifest(request.out)
    if finished is not None and finished.get("request") == identity:
        shutil.rmtree(request.out.with_name(f"{request.out.name}.part"), ignore_errors=True)
        watcher.note(f"{request.out} is prepared already")
        return finished
    _refuse_existing(request.out)
    if not request.skip_bad:
        _refuse_unreadable(reading)
    with interrupted() as stop:
        return write_folder(Preparation(request, reading, tokenizer, watcher, stop), identity)


def inputs_of(request: PreparationRequest) -> tuple[Reading, tokenizers.Tokenizer | None]:
    """Return the sources, and the tokenizer unless it is trained. Raises UserError."""
    sources = tuple(find_sources(request.sources))
    tokenizer: tokenizers.Tokenizer | None = None
    if request.tokenizer == "byte":
        tokenizer = tokenizers.ByteTokenizer()
    elif request.tokenizer is not None:
        path = tokenizers.find(request.tokenizer, "--tokenizer")
        tokenizer = tokenizers.load(path, key="--tokenizer", eos=request.eos)
    template = None
    if request.is_chat:
        assert tokenizer is not None, "a chat needs the tokenizer of its model"
        template = find_template(tokenizer, request.chat_template)
    form = request.field, request.separator, request.validation
    reading = Reading(sources, *form, template, request.kind)
    if request.kind == "labels":
        reading = with_labels(reading, request.labels or 0)
    return reading, tokenizer


def write_folder(job: Preparation, identity: Json) -> Json:
    """Tokenize the sources into the folder `request.out`, which does not exist, as `prepare`."""
    request = job.request
    with folder.opened(request.out, identity) as path:
        whole = path / "whole"
        tokenizer = write_tokenizer(job, whole)
        sizes = [source.bytes for source in job.reading.sources]
        dtype = smallest_type(tokenizer.vocab_size)
        unfinished = UnfinishedFolder(path, dtype, sizes, request.kind != "text")
        _fill(unfinished, path, job)
        _refuse_empty(unfinished.progress, request)
        unfinished.publish(
            request.out, manifest_of(identity, tokenizer, whole, unfinished.progress)
        )
    result = manifest(request.out)
    assert result is not None, "it was just written"
    return result


def write_tokenizer(job: Preparation, whole: Path) -> tokenizers.Tokenizer:
    """Write the tokenizer, and the template of chats, into a folder; return the tokenizer."""
    template, tokenizer = job.reading.template, job.tokenizer
    if template is not None and template.source == PLAIN:
        job.watcher.note(
            "the tokenizer has no chat template: messages are written as `User: …` and `Assistant: …` "
            "(--chat-template FILE for another)"
        )
    if tokenizer is None:
        tokenizer = _train_tokenizer(job, whole / TOKENIZER)
    elif isinstance(tokenizer, tokenizers.FileTokenizer):
        end = {"eos_token": tokenizer.name_of(tokenizer.eos)}
        folder.write_document(whole / tokenizers.CONFIG, tokenizers.config_of(tokenizer.path) | end)
        folder.write_whole(whole / TOKENIZER, [tokenizer.path.read_bytes()])
    if template is not None:
        folder.write_whole(whole / TEMPLATE, [template.source.encode()])
    return tokenizer


def _fill(unfinished: UnfinishedFolder, path: Path, job: Preparation) -> None:
    """Tokenize everything after the last commit."""
    request, reading, watcher = job.request, job.reading, job.watcher
    total = sum(source.bytes for source in reading.sources)
    file = path / "whole" / TOKENIZER
    setup = Setup(reading, file if file.exists() else None, unfinished.dtype)
    if unfinished.progress != PreparationProgress():
        watcher.note(f"continues after {unfinished.progress.documents:,} documents")
    refuse_bad(unfinished.progress, request, path)
    chunks = read_chunks(reading, unfinished.progress.cursor)
    committed = time.monotonic()
    with closing(chunks), encoding(request.workers, chunks, setup, job.stop) as results:
        try:
            for chunk, encoded in results:
                unfinished.add(chunk, encoded)
                refuse_bad(unfinished.progress, request, path)
                watcher.progress(unfinished.progress, total)
                if time.monotonic() - committed >= COMMIT_S:
                    unfinished.commit()
                    committed = time.monotonic()
        except KeyboardInterrupt:
            unfinished.commit()
            raise


@contextmanager
def encoding(
    workers: int, chunks: Iterator[Chunk], setup: Setup, stop: threading.Event
) -> Iterator[Iterator[tuple[Chunk, Encoded]]]:
    """Provide every chunk with its tokens, in order."""
    if workers == 1:
        with closing(encode_here(chunks, setup, stop)) as results:
            yield results
    else:
        with Pool([setup] * workers, stop, queued=2) as pool:
            yield pool.map(chunks)


def refuse_bad(
    progress: PreparationProgress, request: PreparationRequest, path: Path | None = None
) -> None:
    """Raise a UserError for bad records, unless they are left out; `path`: the folder of what was committed."""
    if progress.bad == 0 or request.skip_bad:
        return
    kept = f"; what was prepared is kept in {path}" if path and folder.committed(path) else ""
    raise bad_records_error(progress.shown[:_MOST_SHOWN], kept, kind=request.kind)


def _refuse_unreadable(reading: Reading) -> None:
    """Check the frame of every file before anything is written."""
    checks = (problem(source, reading) for source in reading.sources)
    bad_records = [bad for bad in checks if bad is not None]
    if bad_records:
        nothing_else = len(bad_records) == len(reading.sources)
        raise bad_records_error(bad_records[:_MOST_SHOWN], nothing_else=nothing_else)


def _refuse_existing(out: Path) -> None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    what = "already exists, and is not the result of this request"
    violation = Violation("--out", str(out), "", what, remedy="choose another folder, or remove it")
    raise UserError("data", f"{out} {what}", [violation])


def _refuse_empty(progress: PreparationProgress, request: PreparationRequest) -> None:
    if progress.train.documents == 0:
        raise UserError("data", "the sources hold no document to train on")
    if request.validation and progress.valid.documents == 0:
        what = f"holds out none of {progress.documents:,} documents"
        violation = Violation("--validation", request.validation, "", what, ("--validation 0.1",))
        raise UserError("data", f"--validation {request.validation}: {what}", [violation])


def _train_tokenizer(job: Preparation, target: Path) -> tokenizers.Tokenizer:
    """Return a BPE of the sources; an earlier attempt may have trained it."""
    if not target.exists():
        size = job.request.vocab_size
        job.watcher.note(f"training a tokenizer of {size:,} tokens")
        temporary = target.with_name(f"{TOKENIZER}.trained")
        tokenizers.train_bpe(_sample(job), size, temporary)
        folder.write_whole(target, [temporary.read_bytes()])
        temporary.unlink()
    return tokenizers.load(target)


def _sample(job: Preparation) -> Iterator[str]:
    """Yield texts to train a tokenizer on: the beginning of every source, without held-out documents."""
    request, reading, sources = job.request, job.reading, job.reading.sources
    share = min(1.0, _SAMPLE / sum(source.bytes for source in sources))
    for number, source in enumerate(sources):
        start = Cursor(number)
        for chunk in read_chunks(replace(reading, sources=sources[: number + 1]), start):
            if job.stop.is_set():
                raise KeyboardInterrupt
            documents = Documents(chunk, reading)
            yield from (document.text for document, is_held_out in documents if not is_held_out)
            if documents.bad and not request.skip_bad:
                raise bad_records_error(documents.bad[:_MOST_SHOWN], kind=request.kind)
            if chunk.read > share * source.bytes:
                break


def identity_of(
    request: PreparationRequest, reading: Reading, tokenizer: tokenizers.Tokenizer | None
) -> Json:
    """Return the settings and inputs that determine the bytes; a `tokenizer` of None is trained."""
    identity: Json = {"format": FORMAT}
    if tokenizer is None:
        identity |= {"tokenizer": "trained", "vocab-size": request.vocab_size}
    else:
        file = tokenizer.path if isinstance(tokenizer, tokenizers.FileTokenizer) else None
        identity["tokenizer"] = tokenizers.digest(file) if file else "byte"
        identity["eos"] = tokenizer.eos
    if reading.template:
        identity["chat-template"] = hashlib.sha256(repr(reading.template).encode()).hexdigest()
    if reading.kind in ("pairs", "rated"):
        identity[reading.kind] = True
    if reading.labels:
        identity["labels"] = reading.labels
    if reading.label_names:
        identity["label-names"] = list(reading.label_names)
    return {
        **identity,
        "field": reading.field,
        "separator": reading.separator,
        "validation": reading.validation,
        "sources": [source.document() for source in reading.sources],
    }


def manifest_of(
    identity: Json, tokenizer: tokenizers.Tokenizer, whole: Path, progress: PreparationProgress
) -> Json:
    """Return the manifest of a folder whose tokenizer is in `whole`."""
    file, labels = whole / TOKENIZER, identity.get("labels")
    has_answers = bool(labels) or (whole / TEMPLATE).exists()
    return {
        "request": identity,
        "vocabulary": tokenizer.vocab_size,
        "eos": tokenizer.eos,
        "tokenizer": tokenizers.digest(file) if file.exists() else "byte",
        "type": str(smallest_type(tokenizer.vocab_size)),
        "train": _counts(progress.train, has_answers),
        "valid": _counts(progress.valid, has_answers),
        **({"answers": "one byte a token"} if has_answers else {}),
        **{kind: True for kind in ("pairs", "rated") if identity.get(kind)},
        **({"labels": labels} if labels else {}),
        **({"label_names": identity["label-names"]} if "label-names" in identity else {}),
        "text_bytes": progress.text_bytes,
        "empty": progress.empty,
        "bad": progress.bad,
        "bad_records": [{"place": bad.place, "what": bad.what} for bad in progress.shown],
    }


def _counts(count: folder.Count, has_answers: bool) -> dict[str, int]:
    counts = {"documents": count.documents, "tokens": count.tokens}
    return counts | ({"answers": count.answers} if has_answers else {})


@contextmanager
def interrupted() -> Iterator[threading.Event]:
    """Provide an event that the first Ctrl-C sets; the second one ends the process at once, without a
    commit."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: Any) -> None:
        stop.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
