"""Sources of text: files, given by name, folder or pattern, and Hugging Face datasets."""

import atexit
import codecs
import glob
import hashlib
import os
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Literal, NoReturn

from nanoscale.common.errors import UserError, Violation
from nanoscale.common.json_text import parse
from nanoscale.common.object_storage import is_address, open_storage, retried, version_of
from nanoscale.common.versions import missing
from nanoscale.config.hf.hub import asking, missing_path, similar_paths, why_not
from nanoscale.data.prepare.records import EMPTY, LABEL, PAIR, QUESTION, Bad, csv_header, holds_pair
from nanoscale.data.prepare.render import INPUT, TOOLS, VARIABLES, Template, pair_in

Kind = Literal["text", "jsonl", "json", "csv", "tar", "parquet", "dataset"]
KINDS: dict[str, Kind] = {
    ".txt": "text",
    ".md": "text",
    ".jsonl": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tar": "tar",
    ".parquet": "parquet",
}
_NAMED_ONLY = {".md", ".json", ".csv"}
"""Endings that are read if they are named or match a pattern; in a folder they may be descriptions of data."""
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
DATASET = "hf:"
_BLOCK = 1 << 20
_SPLITS, _ONE_SPLIT = "dataset_dict.json", "state.json"
"""Files that `save_to_disk` writes into the folder of several splits, and of one."""

_KNOWN = ".txt, .md, .jsonl, .json, .csv, .tar (all also .gz and .zst), .parquet"


@dataclass(frozen=True)
class TextSource:
    """One file, or one split of a dataset."""

    name: str
    """Its absolute path, its address, hf:NAME…, or `standard input`."""
    kind: Kind
    compression: str
    """gzip, zstd or nothing."""
    bytes: int
    """Size on disk, or in memory for a dataset."""
    version: str
    """Changes with the content: the time of the file's last change, the object's ETag, the dataset's
    fingerprint, the sum of standard input."""
    copy: str = ""
    """For standard input and objects: the file that holds it meanwhile."""

    def place(self, record: int) -> str:
        """Return the position of a record: a line of text or a row of a table, from 1."""
        return f"{self.name}{':' if self.kind in ('text', 'jsonl') else ', row '}{record}"

    def document(self) -> dict[str, Any]:
        """Return what identifies the source in a later request."""
        return {key: value for key, value in asdict(self).items() if key != "copy"}


RecordKind = Literal["text", "labels", "chat", "pairs", "rated"]
"""The kind of records: texts, texts with a LABEL, chats, pairs of chats, which become two documents, the chosen
one first, or chats whose LABEL says whether the answer is good."""
CHATS = ("chat", "pairs", "rated")
"""The kinds that a template renders."""


@dataclass(frozen=True)
class Reading:
    """The way records become documents."""

    sources: tuple[TextSource, ...]
    field: str = "text"
    separator: str | None = None
    """The separator of documents in a text file; None: each file is one document."""
    validation: float = 0.0
    """The share of the documents that is held out."""
    template: Template | None = None
    """The template that renders chats, whose messages are in `field`; None: records are texts."""
    kind: RecordKind = "text"
    labels: int = 0
    """The number of classes of the records; each record has a text and a LABEL. 0: they have no labels."""
    label_names: tuple[str, ...] = ()
    """The names of the first classes, from class 0 on; (): labels are the numbers of classes."""

    @property
    def is_chat(self) -> bool:
        """True if a column may hold lists of messages."""
        return self.template is not None

    def separator_of(self, source: TextSource) -> bytes | None:
        """Return the separator of a source's records; None if a file is one record."""
        if source.kind == "jsonl":
            return b"\n"
        return self.separator.encode() if self.separator is not None else None


def find_sources(arguments: Sequence[str]) -> list[TextSource]:
    """List the sources in the order given; the files of a pattern or a folder are sorted by name.

    Raises UserError for a source that does not exist, has no known kind or is named twice.
    """
    sources: list[TextSource] = []
    problems = []
    for argument in arguments:
        try:
            sources += _find_argument(argument)
        except _UnusableError as error:
            problems.append(Violation(argument, None, "", str(error), error.instead))
    names = [source.name for source in sources]
    duplicates = [name for name, count in Counter(names).items() if count > 1]
    problems += [Violation(name, None, "", "is named twice") for name in duplicates]
    if problems:
        first = problems[0]
        message = f"{first.key}: {first.message}" if len(problems) == 1 else "sources are wrong"
        raise UserError("data", message, problems)
    return sources


def problem(source: TextSource, reading: Reading) -> Bad | None:
    """Return a problem of a whole file, as far as its frame shows one."""
    if source.bytes == 0:
        return Bad(source.name, EMPTY)
    if source.kind == "parquet":
        return _parquet_problem(source, reading)
    if source.kind == "dataset":
        return _column_problem(source, dataset(source.name).data.schema, reading)
    if source.kind == "csv":
        return _csv_problem(source, reading)
    if reading.kind != "text" and source.kind == "text":
        what = "is plain text, which holds no chats and no labels; .jsonl, .json, .csv, .tar and .parquet do"
        return Bad(source.name, what)
    return None


@lru_cache
def dataset(name: str) -> Any:
    """Open the dataset hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT, mapped into memory.

    Raises _UnusableError if a folder of `save_to_disk` lacks the requested split or configuration.
    """
    from datasets import load_dataset, load_from_disk

    path, *rest = name.removeprefix(DATASET).split(":")
    if len(rest) > 2:
        raise _UnusableError("has more parts than NAME:CONFIG:SPLIT")
    split = rest[-1] if rest else None
    config = rest[0] if len(rest) == 2 else None
    folder = Path(path).expanduser()
    if any((folder / name).is_file() for name in (_SPLITS, _ONE_SPLIT)):
        return load_from_disk(str(_saved_split(folder, config, split)))
    if folder.exists():
        return load_dataset(str(folder), config, split=split or "train")
    if missing_path(path) is not None:
        similar = (":".join([DATASET + other, *rest]) for other in similar_paths(path))
        raise _UnusableError("there is no such folder", *map(shlex.quote, similar))
    with asking(path) as cache_only, _looking_in_cache(cache_only):
        return load_dataset(path, config, split=split or "train")


@contextmanager
def _looking_in_cache(alone: bool) -> Iterator[None]:
    """Restrict the datasets library to its cache within the body, if `alone`."""
    from datasets import config
    from huggingface_hub import constants

    previous = config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    if alone:
        config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = previous


def _saved_split(folder: Path, config: str | None, split: str | None) -> Path:
    """Return the folder of a split, which a folder of `save_to_disk` contains or is itself."""
    named = f"{DATASET}{folder}"
    if config is not None:
        what = f"has no configuration {config}: it was written by save_to_disk, which keeps none"
        raise _UnusableError(what, shlex.quote(f"{named}:{split}"))
    if not (folder / _SPLITS).is_file():
        saved_split = parse((folder / _ONE_SPLIT).read_bytes()).get("_split")
        if split not in (None, saved_split):
            only = (
                f"its only split is {saved_split}"
                if saved_split
                else "it is one split, without a name"
            )
            raise _UnusableError(f"has no split {split}: {only}", shlex.quote(named))
        return folder
    splits = parse((folder / _SPLITS).read_bytes())["splits"]
    requested = split or "train"
    if requested not in splits:
        what = f"has no split {requested}: it holds {', '.join(splits)}"
        raise _UnusableError(what, *(shlex.quote(f"{named}:{name}") for name in splits))
    return folder / requested


class _UnusableError(Exception):
    def __init__(self, what: str, *instead: str) -> None:
        super().__init__(what)
        self.instead = instead
        """Overrides for the command line, quoted if the shell needs it."""


def _find_argument(argument: str) -> Iterator[TextSource]:
    if argument.startswith(DATASET):
        yield _dataset(argument)
        return
    if argument == "-":
        yield _standard_input()
        return
    if is_address(argument):
        yield from objects_below(argument)
        return
    path = Path(argument).expanduser()
    if path.is_file():
        yield _file(path)
    elif path.is_dir():
        walk = os.walk(path, onerror=_refuse_folder)  # Path.rglob would leave it out
        files = (p for at, _, names in walk for name in names if _kind(p := Path(at, name)))
        yield from _several(argument, (p for p in files if ending(p)[0] not in _NAMED_ONLY))
    elif glob.has_magic(argument):
        folder = next(parent for parent in path.parents if not glob.has_magic(str(parent)))
        if folder.is_dir():
            list(folder.iterdir())  # raises if it may not be read, where a pattern finds nothing
        # Path.glob accepts no absolute pattern.
        matches = (Path(name) for name in glob.glob(str(path), recursive=True))  # noqa: PTH207
        yield from _several(argument, matches)
    else:
        raise _UnusableError("there is no such file")


def _standard_input() -> TextSource:
    """Copy standard input to a file that lives as long as this process, since it can be read only once."""
    if sys.stdin.isatty():
        raise _UnusableError("standard input is a terminal; pipe a file into the command")
    digest, first, size = hashlib.sha256(), b"", 0
    try:
        with NamedTemporaryFile(prefix="nanoscale-input-", delete=False) as file:
            atexit.register(Path(file.name).unlink, missing_ok=True)
            while block := sys.stdin.buffer.read(_BLOCK):
                first = first or block.removeprefix(codecs.BOM_UTF8).lstrip()[:1]
                size += file.write(block)
                digest.update(block)
    except OSError as error:
        raise _UnusableError(f"standard input cannot be copied: {error}") from error
    kind: Kind = "jsonl" if first == b"{" else "text"
    return TextSource("standard input", kind, "", size, digest.hexdigest(), file.name)


def _refuse_folder(error: OSError) -> NoReturn:
    raise error


def _several(argument: str, paths: Iterator[Path]) -> Iterator[TextSource]:
    files = sorted(path for path in paths if path.is_file())
    if not files:
        raise _UnusableError(
            f"no readable file there; supported are {_KNOWN}; of a folder, .md, .json and"
            " .csv must be named by a pattern"
        )
    yield from map(_file, files)


def _file(path: Path) -> TextSource:
    form = _kind(path)
    if form is None:
        raise _UnusableError(f"{path.name} cannot be read; supported are {_KNOWN}")
    kind, compression = form
    with path.open("rb"):  # raises if it may not be read, before anything is written
        stat = path.stat()
    return TextSource(str(path.absolute()), kind, compression, stat.st_size, str(stat.st_mtime_ns))


def _kind(path: Path) -> tuple[Kind, str] | None:
    suffix, compression = ending(path)
    kind = KINDS.get(suffix)
    if kind is None or (kind == "parquet" and compression):
        return None
    return kind, compression


def ending(path: Path) -> tuple[str, str]:
    """Return the ending that names the form, and the compression or ""."""
    compression = COMPRESSIONS.get(path.suffix, "")
    return (Path(path.stem).suffix if compression else path.suffix), compression


def _dataset(argument: str) -> TextSource:
    if what := missing("datasets"):
        raise _UnusableError(f"needs {what}")
    try:
        data = dataset(argument)
    except _UnusableError:
        raise
    except Exception as error:  # a hub, a network and a cache can raise anything
        raise _UnusableError(f"cannot be loaded: {why_not(error)}") from error
    return TextSource(argument, "dataset", "", max(1, data.data.nbytes), data._fingerprint)


def _parquet_problem(source: TextSource, reading: Reading) -> Bad | None:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(source.copy or source.name) as file:
            schema, rows = file.schema_arrow, file.metadata.num_rows
    except (pa.ArrowException, OSError) as error:
        return Bad(source.name, f"is not a readable parquet file: {first_line(error)}")
    if rows == 0:
        return Bad(source.name, EMPTY)
    return _column_problem(source, schema, reading)


def _csv_problem(source: TextSource, reading: Reading) -> Bad | None:
    try:
        with opened(source) as (stream, _):
            names = csv_header(stream)
    except (OSError, ValueError) as error:
        return Bad(source.name, f"cannot be read: {first_line(error)}")
    if not names:
        return Bad(source.name, EMPTY)
    if reading.kind == "pairs":
        if holds_pair(names):
            return None
    elif reading.field in names or (reading.is_chat and pair_in(names)):
        return None
    return Bad(source.name, f"{_missing(reading)}; its columns: {', '.join(names[:8])}")


def _missing(reading: Reading) -> str:
    if reading.kind == "pairs":
        return "has no columns 'chosen' and 'rejected'"
    return f"has no column {reading.field!r} (--field)" + f" or {LABEL!r}" * (
        reading.kind == "labels"
    )


@contextmanager
def opened(source: TextSource) -> Iterator[tuple[Any, Any]]:
    """Open the uncompressed text, and the file itself."""
    import pyarrow as pa

    with pa.OSFile(source.copy or source.name) as raw:
        if source.compression:
            with pa.CompressedInputStream(raw, source.compression) as stream:
                yield stream, raw
        else:
            yield raw, raw


@contextmanager
def local_copy(source: TextSource) -> Iterator[TextSource]:
    """Fetch an object of a storage into a temporary file, which lives as long as the body.

    Raises:
        OSError: it cannot be fetched.
    """
    if not is_address(source.name):
        yield source
        return
    storage, path = open_storage(source.name)
    with NamedTemporaryFile(prefix="nanoscale-object-", suffix=Path(path).suffix) as file:
        try:
            retried(lambda: storage.get_file(path, file.name))
        except Exception as error:  # storage libraries have classes of their own
            raise OSError(f"cannot be fetched: {first_line(error)}") from error
        yield replace(source, copy=file.name)


def objects_below(address: str) -> list[TextSource]:
    """List the texts below an address, or the one that it names; storage libraries raise errors of any kind."""
    storage, path = open_storage(address)
    start = address[: address.index("://") + 3]
    sources = []
    for key, properties in sorted(retried(lambda: storage.find(path, detail=True)).items()):
        form = _kind(Path(key))
        if form is not None and (key == path or ending(Path(key))[0] not in _NAMED_ONLY):
            version = version_of(properties)
            sources.append(TextSource(f"{start}{key}", *form, properties["size"], version))
    return sources


def _column_problem(source: TextSource, schema: Any, reading: Reading) -> Bad | None:
    import pyarrow as pa

    field, chat = reading.field, reading.is_chat
    columns = columns_of(schema, reading)
    if not columns:
        names = ", ".join(schema.names)
        return Bad(source.name, f"{_missing(reading)}; its columns: {names}")
    kind = _type_of(schema, field)
    if reading.kind in ("pairs", "labels") or kind is None:
        return None  # questions and answers are checked record by record
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_list_view)
    if _is_text(kind) or (chat and any(is_kind(kind) for is_kind in lists)):
        return None
    expected = "messages" if chat else "text"
    return Bad(source.name, f"its column {field!r} holds {kind}, not {expected}")


def columns_of(schema: Any, reading: Reading) -> list[str]:
    """Return the columns of a record: the field's, or a question's and its answer's; [] if none."""
    field = reading.field
    labels = [LABEL] if reading.kind in ("labels", "rated") else []
    more = [*labels, *([TOOLS, VARIABLES] if reading.is_chat else [])]
    pair = pair_in(schema.names) if reading.is_chat else None
    if reading.kind == "pairs":
        names = [*PAIR, QUESTION] if holds_pair(schema.names) else []
    elif _type_of(schema, field) is not None and set(labels).issubset(schema.names):
        names = [field if field in schema.names else field.split(".")[0]]
    else:
        names = [] if pair is None else [*pair, INPUT]
    return [name for name in [*names, *more] if name in schema.names] if names else []


def inner_names(schema: Any, field: str) -> list[str]:
    """Return the names within a column of objects that lead to `a.b`; [] if `field` is a column."""
    return [] if field in schema.names else field.split(".")[1:]


def _type_of(schema: Any, field: str) -> Any:
    """Return the Arrow type of a column, or of `a.b` within the column `a`; None if there is none."""
    import pyarrow as pa

    if field in schema.names:
        return schema.field(field).type
    column, *names = field.split(".")
    kind = schema.field(column).type if column in schema.names else None
    for name in names:
        if kind is None or not pa.types.is_struct(kind) or kind.get_field_index(name) < 0:
            return None
        kind = kind.field(name).type
    return kind


def _is_text(kind: Any) -> bool:
    """True if a column of this Arrow type holds text, encoded by a dictionary or not."""
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        return _is_text(kind.value_type)
    kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(is_kind(kind) for is_kind in kinds)


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
