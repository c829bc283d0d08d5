"""The embedded corpus: the source code of the running Python's standard library.

The first process that needs it prepares it once, as `prepare.preparation` does, in a folder of the cache:

    stdlib-<interpreter>-<tokenizer>-<key>/   a prepared folder
    stdlib-….lock                             held while one process prepares
    stdlib-….part/                            unfinished work, also of a killed process
"""

import fcntl
import hashlib
import json
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from nanoscale.common.cache_folder import cache_path
from nanoscale.common.errors import UserError, Violation
from nanoscale.common.json_text import Json
from nanoscale.config.schema import Data
from nanoscale.config.token_files import TOKENIZER, TOKENS, manifest
from nanoscale.data.prepare.preparation import (
    Preparation,
    PreparationRequest,
    identity_of,
    write_folder,
)
from nanoscale.data.prepare.sources import Reading, TextSource
from nanoscale.data.tokens.files import bin_path
from nanoscale.data.tokens.tokenizer import ByteTokenizer, Tokenizer, load
from nanoscale.processes.scratch import flock

# Tests, installed packages, and two packages of generated tables.
_LEFT_OUT = {
    "site-packages",
    "dist-packages",
    "__pycache__",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "pydoc_data",
}


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus in the cache."""

    folder: Path
    manifest: Json

    @property
    def prefix(self) -> Path:
        return self.folder / TOKENS

    @property
    def fingerprint(self) -> str:
        """A digest of the tokens."""
        with bin_path(self.prefix).open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()

    def tokenizer(self) -> Tokenizer:
        path = self.folder / TOKENIZER
        return load(path) if path.exists() else ByteTokenizer()


def prepare(data: Data) -> Corpus:
    """Return the embedded corpus for these settings, from the cache or newly prepared.

    Raises UserError if this Python has no sources or the cache folder cannot be written.
    """
    return prepare_corpus(stdlib_folder(), cache_folder(data), data.tokenizer, data.bpe_vocab)


def stdlib_folder() -> Path:
    """Return the folder of the running Python's standard library, also from within a virtual environment."""
    folder = Path(sysconfig.get_path("stdlib"))
    if not (folder / "os.py").is_file():
        raise _no_sources(folder)
    return folder


def cache_folder(data: Data) -> Path:
    """Return the folder of prepared corpora: data.cache_dir, $NANOSCALE_CACHE or the user's cache folder."""
    try:
        return cache_path(data.cache_dir)
    except RuntimeError as error:
        raise _unwritable(Path("~/.cache"), error) from error


def prepare_corpus(sources: Path, cache: Path, tokenizer: str, bpe_vocab: int) -> Corpus:
    """Tokenize every Python file below `sources` into `cache`, unless this was done before.

    `tokenizer` is `byte`, `bpe` (trained here, at most `bpe_vocab` tokens) or the path of a tokenizer.json.
    Concurrent processes wait for the one that prepares.
    """
    files = Reading(tuple(_text_source(sources, path) for path in source_files(sources)))
    if not files.sources:
        raise _no_sources(sources)
    existing: Tokenizer | None = None
    if tokenizer != "bpe":
        existing = ByteTokenizer() if tokenizer == "byte" else load(tokenizer)
    request = PreparationRequest((), cache, tokenizer, vocab_size=bpe_vocab)
    identity = {"python": sys.version, **identity_of(request, files, existing)}
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    kind = tokenizer if tokenizer in ("byte", "bpe") else "file"
    name = f"{sys.implementation.name}-{platform.python_version()}-{kind}-{key[:16]}"
    request = replace(request, out=cache / f"stdlib-{name}")
    corpus = _complete_corpus(request.out, identity)
    if corpus:
        return corpus
    with _locked(request.out):
        corpus = _complete_corpus(request.out, identity)
        if corpus is None:
            shutil.rmtree(request.out, ignore_errors=True)  # it is incomplete
            reading = Reading(tuple(filter(_holds_text, files.sources)))
            if not reading.sources:
                raise _no_sources(sources)
            done = write_folder(Preparation(request, reading, existing), identity)
            corpus = Corpus(request.out, done)
    return corpus


def source_files(folder: Path) -> list[Path]:
    """List the Python files of a library, relative to it, in an order that mixes its packages.

    Files are sorted by the digests of their paths. So the documents at the end, which are held out, are a fair
    sample, and adding or removing a file moves no other.
    """
    files = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        paths = (Path(parent, name) for name in names if name.endswith(".py"))
        files += [path.relative_to(folder) for path in paths if os.access(path, os.R_OK)]
    return sorted(files, key=lambda path: hashlib.sha256(os.fsencode(path.as_posix())).digest())


def _text_source(folder: Path, path: Path) -> TextSource:
    """Return a file as a source; only its name and size identify it, so that hosts can share a cache."""
    file = folder / path
    return TextSource(path.as_posix(), "text", "", file.stat().st_size, "", str(file))


def _holds_text(source: TextSource) -> bool:
    """True if a file holds UTF-8 text and is not empty."""
    try:
        return bool(Path(source.copy).read_bytes().decode().strip())
    except UnicodeDecodeError:
        return False


def _complete_corpus(folder: Path, identity: Json) -> Corpus | None:
    """Return the corpus of this folder, or None if it is incomplete; checks only names and sizes."""
    try:
        written = manifest(folder) or {}
        sizes = {name: (folder / name).stat().st_size for name in written["files"]}
    except (OSError, KeyError):
        return None
    is_complete = written.get("request") == identity and sizes == written["files"]
    return Corpus(folder, written) if is_complete else None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder that is to be prepared; the system releases it when the process dies."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_name(f"{folder.name}.lock").open("a", encoding="utf-8") as lock:
            flock(lock.fileno(), fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise _unwritable(folder.parent, error) from error


def _no_sources(folder: Path) -> UserError:
    what = f"this Python ({sys.executable}) has no sources of its standard library in {folder}"
    message = f"{what}; use a Python that has them, or your own tokens"
    suggestions = ("data.source=megatron data.path=PREFIX",)
    violation = Violation("data.source", "stdlib", "", message, suggestions)
    return UserError("data", f"data.source=stdlib: {what}", [violation])


def _unwritable(cache: Path, error: Exception) -> UserError:
    what = f"the corpus cannot be prepared there: {error}"
    violation = Violation("data.cache_dir", str(cache), "", what, ("data.cache_dir=FOLDER",))
    return UserError("data", f"data.cache_dir: {cache}: {what}", [violation])
