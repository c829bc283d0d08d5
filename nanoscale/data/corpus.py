"""The embedded corpus: the source code of the running Python's standard library.

The first process that needs it prepares it once, in a folder of the cache:

    stdlib-<interpreter>-<tokenizer>-<key>/   tokens.bin  tokens.idx  manifest.json  tokenizer.json
    stdlib-….lock                             held while one process prepares
    stdlib-….part/                            unfinished work, also that of a killed process
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import shutil
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoscale.common.cache_folder import cache_path
from nanoscale.common.errors import UserError, Violation
from nanoscale.config.schema import Data
from nanoscale.data.indexed import IndexedWriter, bin_path, smallest_type
from nanoscale.data.tokenizer import ByteTokenizer, Tokenizer, load, train_bpe
from nanoscale.processes.flock import flock
from nanoscale.runs.directory import sync_folder

FORMAT = 1
"""Raised whenever the same settings would give other tokens."""

Settings = dict[str, Any]

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
    manifest: dict[str, Any]
    """documents, tokens, bytes, vocabulary, settings, files, sha256 of tokens.bin, seconds."""

    @property
    def prefix(self) -> Path:
        return self.folder / "tokens"

    @property
    def fingerprint(self) -> str:
        """A digest of the tokens."""
        return str(self.manifest["sha256"])

    def tokenizer(self) -> Tokenizer:
        path = self.folder / "tokenizer.json"
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
    files = source_files(sources)
    if not files:
        raise _no_sources(sources)
    settings = _settings(tokenizer, bpe_vocab)
    key = _key(sources, files, settings)
    kind = tokenizer if tokenizer in ("byte", "bpe") else "file"
    folder = cache / f"stdlib-{_interpreter()}-{kind}-{key[:16]}"
    corpus = _complete_corpus(folder, key)
    if corpus:
        return corpus
    with _locked(folder):
        return _complete_corpus(folder, key) or _build(
            folder, sources, files, tokenizer, settings, key
        )


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


def _build(
    folder: Path, sources: Path, files: list[Path], tokenizer: str, settings: Settings, key: str
) -> Corpus:
    """Prepare next to `folder`, then rename to it in one step; the caller holds the lock."""
    temporary = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(temporary, ignore_errors=True)  # its process is dead, since we hold the lock
    shutil.rmtree(folder, ignore_errors=True)  # it is incomplete
    temporary.mkdir()
    try:
        texts = _texts(sources, files)
        manifest = {
            "key": key,
            "settings": settings,
            **_fill(temporary, texts, tokenizer, settings),
        }
        _write_durably(temporary / "manifest.json", json.dumps(manifest, indent=1).encode())
        sync_folder(temporary)
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_folder(folder.parent)
    return Corpus(folder, manifest)


def _fill(folder: Path, texts: list[str], tokenizer: str, settings: Settings) -> dict[str, Any]:
    """Write the tokens of these texts and their tokenizer, and return the manifest."""
    started = time.perf_counter()
    encoder = _tokenizer(tokenizer, texts, settings, folder)
    tokens = 0
    with IndexedWriter(folder / "tokens", smallest_type(encoder.vocab_size)) as writer:
        for document in encoder.encode_documents(texts):
            writer.add_document(document)
            tokens += len(document)
        writer.finish()
    return {
        "documents": len(texts),
        "tokens": tokens,
        "bytes": sum(len(text.encode()) for text in texts),
        "vocabulary": encoder.vocab_size,
        "sha256": hashlib.sha256(bin_path(folder / "tokens").read_bytes()).hexdigest(),
        "files": {path.name: path.stat().st_size for path in sorted(folder.iterdir())},
        "seconds": round(time.perf_counter() - started, 3),
    }


def _texts(sources: Path, files: list[Path]) -> list[str]:
    """Read the files that hold UTF-8 text and are not empty."""
    texts = []
    for path in files:
        try:
            text = (sources / path).read_bytes().decode()
        except UnicodeDecodeError:
            continue
        if text.strip():
            texts.append(text)
    if not texts:
        raise _no_sources(sources)
    return texts


def _tokenizer(name: str, texts: list[str], settings: Settings, folder: Path) -> Tokenizer:
    if name == "byte":
        return ByteTokenizer()
    target = folder / "tokenizer.json"
    if name == "bpe":
        trained = train_bpe(texts, settings["bpe_vocab"], target)
        _sync_file(target)
        return trained
    source = load(name).path
    _write_durably(target, source.read_bytes())
    config = source.with_name("tokenizer_config.json")  # it may name the token that ends a document
    if config.is_file():
        _write_durably(folder / config.name, config.read_bytes())
    return load(target)


def _settings(tokenizer: str, bpe_vocab: int) -> Settings:
    settings: Settings = {"format": FORMAT, "python": sys.version, "tokenizer": tokenizer}
    if tokenizer == "bpe":
        settings["bpe_vocab"] = bpe_vocab
    elif tokenizer != "byte":
        settings["eos"] = load(tokenizer).eos
        content = Path(tokenizer).expanduser().read_bytes()
        settings["tokenizer"] = hashlib.sha256(content).hexdigest()
    return settings


def _key(sources: Path, files: list[Path], settings: Settings) -> str:
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for path in files:
        digest.update(os.fsencode(f"{path.as_posix()}\0{(sources / path).stat().st_size}\0"))
    return digest.hexdigest()


def _interpreter() -> str:
    return f"{sys.implementation.name}-{platform.python_version()}"


def _complete_corpus(folder: Path, key: str) -> Corpus | None:
    """Return the corpus of this folder, or None if it is incomplete; checks only names and sizes."""
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        sizes = {name: (folder / name).stat().st_size for name in manifest["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    is_complete = manifest.get("key") == key and sizes == manifest["files"]
    return Corpus(folder, manifest) if is_complete else None


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


def _write_durably(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    _sync_file(path)


def _sync_file(path: Path) -> None:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def _no_sources(folder: Path) -> UserError:
    what = f"this Python ({sys.executable}) has no sources of its standard library in {folder}"
    violation = Violation(
        "data.source",
        "stdlib",
        "",
        f"{what}; use a Python that has them, or your own tokens",
        ("data.source=megatron data.path=PREFIX",),
    )
    return UserError("data", f"data.source=stdlib: {what}", [violation])


def _unwritable(cache: Path, error: Exception) -> UserError:
    what = f"the corpus cannot be prepared there: {error}"
    violation = Violation("data.cache_dir", str(cache), "", what, ("data.cache_dir=FOLDER",))
    return UserError("data", f"data.cache_dir: {cache}: {what}", [violation])
