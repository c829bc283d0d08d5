"""The embedded corpus: prepared once, whole or not at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

import nanoscale
from nanoscale.common.errors import UserError
from nanoscale.config.schema import Data
from nanoscale.data import corpus
from nanoscale.data.corpus import cache_folder, prepare_corpus, source_files
from nanoscale.data.prepare.folder import UnfinishedFolder
from nanoscale.data.tokens.files import open_tokens
from nanoscale.data.tokens.tokenizer import train_bpe


@pytest.fixture
def library(tmp_path) -> Path:
    """A standard library in small."""
    folder = tmp_path / "lib"
    files = {
        "os.py": b"import sys\n",
        "email/message.py": "name = 'Gr\u00fc\u00dfe'\n".encode(),
        "email/latin.py": "# -*- coding: latin-1 -*-\nname = 'Gr\u00fc\u00dfe'\n".encode("latin-1"),
        "email/__init__.py": b"",
        "test/test_os.py": b"assert True\n",
        "idlelib/idle_test/test_a.py": b"assert True\n",
        "lib2to3/tests/data/a.py": b"print 1\n",
        "site-packages/numpy.py": b"x = 1\n",
        "__pycache__/os.py": b"x = 1\n",
        "README.txt": b"text\n",
    }
    files |= {
        f"package/module_{i}.py": f"def f_{i}():\n    return {i}\n".encode() for i in range(9)
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def prepare(library: Path, cache: Path, tokenizer="byte", vocab=300):
    return prepare_corpus(library, cache, tokenizer, vocab)


def snapshot(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_it_holds_the_library_and_nothing_else(library, tmp_path):
    prepared = prepare(library, tmp_path / "cache")
    tokens = open_tokens("megatron", prepared.prefix)
    texts = {bytes(tokens[i][:-1].astype("u1")).decode() for i in range(len(tokens))}
    modules = list(library.glob("package/*.py"))
    wanted = [library / "os.py", library / "email/message.py", *modules]
    assert texts == {path.read_text() for path in wanted}
    assert all(tokens[i][-1] == 256 for i in range(len(tokens)))
    assert tokens.tokens.dtype == "u2"
    assert prepared.manifest["train"] == {"documents": 11, "tokens": len(tokens.tokens)}
    assert len(tokens) == 11
    assert prepared.manifest["text_bytes"] == len(tokens.tokens) - 11
    assert prepared.manifest["vocabulary"] == 257


def test_the_order_is_mixed_and_a_file_more_moves_no_other(library):
    before = source_files(library)
    assert before != sorted(before)
    (library / "new.py").write_text("x = 1\n")
    after = source_files(library)
    assert [path for path in after if path != Path("new.py")] == before


def test_a_second_call_writes_nothing(library, tmp_path):
    """So a cache that only the administrator can write serves everyone."""
    cache = tmp_path / "cache"
    first = prepare(library, cache)
    next(cache.glob("*.lock")).unlink()
    before = snapshot(tmp_path)
    second = prepare(library, cache)
    assert snapshot(tmp_path) == before
    assert (second.folder, second.manifest) == (first.folder, first.manifest)


def test_the_key_follows_settings_and_sources(library, tmp_path):
    cache = tmp_path / "cache"
    folders = {prepare(library, cache).folder}
    folders.add(prepare(library, cache, "bpe", 300).folder)
    folders.add(prepare(library, cache, "bpe", 290).folder)
    (library / "os.py").write_bytes(b"import sys  # longer\n")
    folders.add(prepare(library, cache).folder)
    assert len(folders) == 4
    fingerprints = {prepare(library, cache, "bpe", vocab).fingerprint for vocab in (300, 260)}
    assert len(fingerprints) == 2


def test_bpe_and_a_tokenizer_of_the_users_own(library, tmp_path):
    cache = tmp_path / "cache"
    trained = prepare(library, cache, "bpe", 290)
    texts = [path.read_text() for path in library.glob("package/*.py")]
    train_bpe(texts, 270, tmp_path / "mine.json")
    given = prepare(library, cache, str(tmp_path / "mine.json"))
    assert given.manifest["vocabulary"] <= 270 < trained.manifest["vocabulary"]
    for prepared in (trained, given):
        tokens, tokenizer = open_tokens("megatron", prepared.prefix), prepared.tokenizer()
        documents = {tokenizer.decode(tokens[i].tolist()) for i in range(len(tokens))}
        assert set(texts) < documents
        assert len(tokens.tokens) < prepare(library, cache).manifest["train"]["tokens"]


@pytest.mark.parametrize("file", ["tokens.bin", "tokens.idx", "manifest.json"])
def test_a_corpus_that_is_not_whole_is_prepared_again(library, tmp_path, file):
    prepared = prepare(library, tmp_path / "cache")
    content = (prepared.folder / file).read_bytes()
    for damage in (lambda path: path.write_bytes(content[:-1]), Path.unlink):
        damage(prepared.folder / file)
        again = prepare(library, tmp_path / "cache")
        assert again.fingerprint == prepared.fingerprint
        assert len(open_tokens("megatron", again.prefix)) == 11


def test_a_cache_that_cannot_be_written_is_named(library, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError) as caught:
        prepare(library, tmp_path / "file" / "cache")
    assert caught.value.kind == "data"
    assert caught.value.violations[0].key == "data.cache_dir"
    assert "Not a directory" in caught.value.message


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_cache_without_permission_is_named(library, tmp_path):
    (tmp_path / "cache").mkdir(mode=0o555)
    with pytest.raises(UserError, match=r"data\.cache_dir.*Permission denied"):
        prepare(library, tmp_path / "cache")


def test_a_full_disk_leaves_nothing(library, tmp_path, monkeypatch):
    def full(self):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(UnfinishedFolder, "commit", full)
    with pytest.raises(UserError, match=r"data\.cache_dir.*No space left"):
        prepare(library, tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_python_without_sources_is_explained(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no sources of its standard library"):
        prepare(tmp_path / "empty", tmp_path / "cache")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "python.zip"))
    with pytest.raises(UserError) as caught:
        corpus.prepare(Data(cache_dir=str(tmp_path / "cache")))
    assert caught.value.violations[0].key == "data.source"
    assert not (tmp_path / "cache").exists()


def test_where_the_cache_lies(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/one")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("NANOSCALE_CACHE", raising=False)
    assert cache_folder(Data()) == Path("/home/one/.cache/nanoscale")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder(Data()) == Path("/home/one/.cache/nanoscale")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder(Data()) == Path("/xdg/nanoscale")
    monkeypatch.setenv("NANOSCALE_CACHE", "/cache")
    assert cache_folder(Data()) == Path("/cache")
    assert cache_folder(Data(cache_dir="~/mine")) == Path("/home/one/mine")
    monkeypatch.chdir(tmp_path)
    assert cache_folder(Data(cache_dir="here")) == tmp_path / "here"


# a process that records its actions in a file, and waits there until the test lets it continue
CHILD = """
import fcntl, pathlib, sys, time
from nanoscale.data import corpus
from nanoscale.data.prepare.folder import UnfinishedFolder

library, cache, notes, until = sys.argv[1:]

def note(word):
    with open(notes, "a") as stream:
        stream.write(word + "\\n")

def wait():
    limit = time.monotonic() + 60
    while pathlib.Path(notes).read_text().split().count(until) < 2 and time.monotonic() < limit:
        time.sleep(0.01)

flock, write, publish = fcntl.flock, corpus.write_folder, UnfinishedFolder.publish

def noted_flock(stream, how):
    if how == fcntl.LOCK_EX:
        note("asking")
    flock(stream, how)

def noted_write(*arguments):
    note("preparing")
    return write(*arguments)

def noted_publish(*arguments):
    note("filled")
    wait()
    publish(*arguments)

corpus.fcntl.flock, corpus.write_folder = noted_flock, noted_write
UnfinishedFolder.publish = noted_publish
print(corpus.prepare_corpus(pathlib.Path(library), pathlib.Path(cache), "byte", 300).fingerprint)
"""


def start(library: Path, cache: Path, notes: Path, until: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(nanoscale.__file__).parents[1])}
    command = [sys.executable, "-c", CHILD, str(library), str(cache), str(notes), until]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def test_two_processes_prepare_once(library, tmp_path):
    notes, cache = tmp_path / "notes", tmp_path / "cache"
    # each process continues only when both have requested the lock
    processes = [start(library, cache, notes, "asking") for _ in range(2)]
    fingerprints = [process.communicate(timeout=90)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert notes.read_text().split().count("asking") == 2
    assert notes.read_text().split().count("preparing") == 1
    assert fingerprints[0] == fingerprints[1] != ""


def test_a_killed_preparation_is_not_taken_for_whole(library, tmp_path):
    notes, cache = tmp_path / "notes", tmp_path / "cache"
    notes.write_text("")
    process = start(library, cache, notes, "never")
    limit = time.monotonic() + 60
    while "filled" not in notes.read_text() and time.monotonic() < limit:
        time.sleep(0.01)
    process.kill()
    process.communicate(timeout=60)
    assert sorted(path.suffix for path in cache.iterdir()) == [".lock", ".part"]
    prepared = prepare(library, cache)
    assert len(open_tokens("megatron", prepared.prefix)) == 11
    assert not list(cache.glob("*.part"))


def test_the_real_library(tmp_path):
    prepared = corpus.prepare(Data(cache_dir=str(tmp_path)))
    tokens = open_tokens("megatron", prepared.prefix)
    assert len(tokens) > 100
    assert len(tokens.tokens) > 3_000_000
    assert json.loads((prepared.folder / "manifest.json").read_text())["train"]["documents"] == len(
        tokens
    )
    text = prepared.tokenizer().decode(tokens.tokens[:1_000_000])
    assert "\n    def " in text
    assert "import " in text
