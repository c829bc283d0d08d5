"""Text to tokens: bit for bit as by another reader, after any interruption and with any number of workers."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer as Native

import nanoscale
from nanoscale.cli.main import run as nanoscale_command
from nanoscale.common.errors import UserError
from nanoscale.data.prepare import chunks, preparation
from nanoscale.data.prepare.preparation import interrupted
from nanoscale.data.prepare.sources import Reading, find_sources, opened
from nanoscale.data.tokens.tokenizer import train_bpe
from nanoscale.processes.pool import LostProcessError, Pool
from tests.data.texts import (
    Interrupter,
    Silent,
    as_bytes,
    every_file,
    found,
    is_held_out,
    pair,
    prepared,
    texts,
    write_jsonl,
    write_parquet,
    write_records,
)
from tests.support.rows import usual_rows

ROOT = Path(nanoscale.__file__).parents[1]


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK", 3000)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    train_bpe(texts(50), 300, path)
    return path


def test_every_kind_of_file_is_read_and_every_bit_is_as_another_reader_has_it(
    tmp_path, bpe, small_chunks
):
    documents = texts(260)
    write_jsonl(tmp_path / "a.jsonl", documents[:100])
    write_jsonl(tmp_path / "b.jsonl.gz", documents[100:150])
    write_jsonl(tmp_path / "c.jsonl.zst", documents[150:200])
    write_parquet(tmp_path / "d.parquet", documents[200:250])
    (tmp_path / "e.txt").write_text(documents[250])
    (tmp_path / "f.txt").write_text("\ufeff" + "<|>".join(documents[251:]) + "<|>")
    (tmp_path / "notes.md").write_text("of no kind that is read")
    out = tmp_path / "out"
    manifest = prepared(out, tmp_path, tokenizer=str(bpe), validation=0.2, separator="<|>")
    native = Native.from_file(str(bpe))
    native.encode_special_tokens = True
    eos = native.token_to_id("<|endoftext|>")
    for name, side in (("tokens", False), ("valid", True)):
        chosen = [text for text in documents if is_held_out(text, 0.2) is side]
        ids = [[*native.encode(text, add_special_tokens=False).ids, eos] for text in chosen]
        assert len(ids) > 30
        assert found(out, name) == pair(ids, code=8)
        split = "valid" if side else "train"
        assert manifest[split] == {"documents": len(ids), "tokens": sum(map(len, ids))}
    assert manifest["text_bytes"] == sum(len(text.encode()) for text in documents)
    assert (out / "tokenizer.json").read_bytes() == bpe.read_bytes()
    assert sorted(manifest["files"]) == sorted(set(every_file(out)) - {"manifest.json"})
    assert not (tmp_path / "out.part").exists()


def test_a_separator_that_overlaps_itself_is_counted_from_the_left(tmp_path, monkeypatch):
    """Also at the borders of chunks, and after an interruption."""
    dice = random.Random(3)
    text = "".join(f"{number}" + "\n" * dice.choice((1, 2, 3, 3, 5)) for number in range(300))
    (tmp_path / "a.txt").write_text(text)
    documents = [part for part in text.split("\n\n") if part.strip()]
    expected = pair([[*part.encode(), 256] for part in documents], code=8)
    for size in (1 << 19, 31, 50):
        monkeypatch.setattr(chunks, "CHUNK", size)
        out = tmp_path / f"out-{size}"
        if size < 50:
            with pytest.raises(KeyboardInterrupt):
                prepared(out, tmp_path / "a.txt", separator="\n\n", watcher=Interrupter(5))
        prepared(out, tmp_path / "a.txt", separator="\n\n")
        assert found(out, "tokens") == expected


def test_a_large_vocabulary_takes_four_bytes(tmp_path):
    native = json.loads(Native.from_str(_words(70_000)).to_str())
    (tmp_path / "tokenizer.json").write_text(json.dumps(native))
    write_jsonl(tmp_path / "a.jsonl", ["w69999 w1", "w2"])
    manifest = prepared(tmp_path / "out", tmp_path / "a.jsonl", tokenizer=str(tmp_path))
    assert manifest["type"] == "int32"
    assert found(tmp_path / "out", "tokens") == pair([[69999, 1, 70000], [2, 70000]], code=4)


def _words(count: int) -> str:
    vocabulary = {f"w{number}": number for number in range(count)} | {"</s>": count}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"}
    return json.dumps({"version": "1.0", "pre_tokenizer": {"type": "Whitespace"}, "model": model,
                       "added_tokens": []})  # fmt: skip


@pytest.mark.slow
def test_any_number_of_workers_makes_the_same_bytes(tmp_path, small_chunks):
    write_jsonl(tmp_path / "a.jsonl", texts(80))
    write_parquet(tmp_path / "b.parquet", texts(40, seed=1))
    for number in (1, 5):
        prepared(tmp_path / f"out{number}", tmp_path / "a.jsonl", tmp_path / "b.parquet",
                 validation=0.1, workers=number)  # fmt: skip
    assert every_file(tmp_path / "out1") == every_file(tmp_path / "out5")


KILLED = """
import os, signal, sys
from pathlib import Path
from nanoscale.data.prepare import chunks, folder, preparation
from tests.data.texts import Silent, prepared

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

class Killer(Silent):
    def progress(self, progress, total):
        super().progress(progress, total)
        if len(self.seen) == {after}:
            print(*[Path(p).read_text() for p in Path('/proc/self/task').glob('*/children')],
                  flush=True)
            die()

chunks.CHUNK = 6000  # so that the tokens are not buffer's: they reach the file before a commit
preparation.COMMIT_S = 0.0
{patch}
if __name__ == "__main__":
    prepared(Path("out"), "a.jsonl.gz", "b.parquet", "c.jsonl", validation=0.1, workers=2,
             watcher=Killer())
"""
KILLS = {
    "after the first commit": (2, ""),
    "late": (19, ""),
    "before the index": (0, "folder._Split.write_index = die"),
    "before it appears": (
        0,
        "Path.rename = lambda self, to, was=Path.rename: die() "
        "if self.name == 'whole' else was(self, to)",
    ),
    "when it has appeared": (0, "folder.shutil.rmtree = die"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "when",
    usual_rows(
        {name: name for name in KILLS}, ("late", "before it appears", "when it has appeared")
    ),
)
def test_killed_and_run_again_it_makes_the_same_bytes(tmp_path, small_chunks, when, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "a.jsonl.gz", texts(120))
    write_parquet(tmp_path / "b.parquet", texts(90, seed=1))
    write_jsonl(tmp_path / "c.jsonl", texts(120, seed=2))
    after, patch = KILLS[when]
    program = tmp_path / "program.py"
    program.write_text(KILLED.format(after=after, patch=patch))
    done = subprocess.run([sys.executable, str(program)], env=os.environ | {"PYTHONPATH": str(ROOT)},
                          capture_output=True, text=True, timeout=120)  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    for pid in done.stdout.split():
        _must_end(int(pid))
    assert (tmp_path / "out").exists() is (when == "when it has appeared")
    before = json.loads((tmp_path / "out.part" / "progress.json").read_bytes())
    sources = ("a.jsonl.gz", "b.parquet", "c.jsonl")
    watcher = Silent()
    prepared(Path("out"), *sources, validation=0.1, watcher=watcher)
    committed = before["train"]["documents"] + before["valid"]["documents"]
    assert 0 < committed <= 330
    assert all(seen.documents > committed for seen in watcher.seen)  # nothing is done again
    assert (committed == 330) is (not watcher.seen)
    assert not (tmp_path / "out.part").exists()
    prepared(Path("whole"), *sources, validation=0.1)
    assert every_file(tmp_path / "out") == every_file(tmp_path / "whole")


def _must_end(pid: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return
        if state in "ZX":
            return
        time.sleep(0.02)
    pytest.fail(f"worker {pid} outlives its parent")


def test_ctrl_c_commits_and_the_same_request_goes_on(tmp_path, small_chunks):
    source = write_jsonl(tmp_path / "a.jsonl", texts(100))
    with pytest.raises(KeyboardInterrupt):
        prepared(tmp_path / "out", source, watcher=Interrupter(3))
    watcher = Silent()
    prepared(tmp_path / "out", source, watcher=watcher)
    assert watcher.notes[0].startswith("continues after")
    assert found(tmp_path / "out", "tokens") == pair(as_bytes(texts(100)), code=8)


def test_a_second_ctrl_c_is_not_held_back():
    with pytest.raises(KeyboardInterrupt), interrupted() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.is_set()
        os.kill(os.getpid(), signal.SIGINT)


def test_a_worker_that_is_killed_is_an_error_and_what_was_done_is_kept(tmp_path, small_chunks):
    source = write_jsonl(tmp_path / "a.jsonl", texts(100))
    made: list[Pool] = []

    class Killer(Silent):
        def progress(self, progress, total):
            made[0]._processes[0].kill()

    enter = Pool.__enter__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pool, "__enter__", lambda self: made.append(self) or enter(self))
        patch.setattr(preparation, "COMMIT_S", 0.0)
        with pytest.raises(LostProcessError, match="signal 9"):
            prepared(tmp_path / "out", source, watcher=Killer(), workers=2)
    prepared(tmp_path / "out", source)
    assert found(tmp_path / "out", "tokens") == pair(as_bytes(texts(100)), code=8)


def test_a_request_that_was_done_is_not_done_again_and_another_is_refused(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", texts(5))
    manifest = prepared(tmp_path / "out", source)
    watcher = Silent()
    assert prepared(tmp_path / "out", source, watcher=watcher) == manifest
    assert watcher.notes == [f"{tmp_path / 'out'} is prepared already"]
    with pytest.raises(UserError, match="already exists"):
        prepared(tmp_path / "out", source, validation=0.5)
    source.write_text(source.read_text() * 2)
    with pytest.raises(UserError, match="already exists"):
        prepared(tmp_path / "out", source)


def test_unfinished_work_of_another_request_is_not_mixed_in(tmp_path, small_chunks):
    source = write_jsonl(tmp_path / "a.jsonl", texts(50))
    with pytest.raises(KeyboardInterrupt):
        prepared(tmp_path / "out", source, watcher=Interrupter(1))
    with pytest.raises(UserError, match="other settings: --validation"):
        prepared(tmp_path / "out", source, validation=0.3)


def test_two_at_once_are_refused(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", texts(5))

    class Second(Silent):
        def progress(self, progress, total):
            with pytest.raises(UserError, match="being prepared by another process"):
                prepared(tmp_path / "out", source)

    prepared(tmp_path / "out", source, watcher=Second())


def test_a_file_system_may_lack_locks_and_durable_folders(tmp_path, monkeypatch):
    def no_lock(*_):
        raise OSError(errno.ENOSYS, "no locks available")

    def no_folder(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "not for folders")

    monkeypatch.setattr("fcntl.flock", no_lock)
    monkeypatch.setattr("os.fsync", no_folder)
    prepared(tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", texts(5)))
    assert (tmp_path / "out" / "manifest.json").is_file()


@pytest.mark.slow
def test_a_tokenizer_is_trained_on_what_is_not_held_out(tmp_path, small_chunks):
    documents = texts(200)
    source = write_jsonl(tmp_path / "a.jsonl.zst", documents)
    for name in ("out", "again"):
        manifest = prepared(
            tmp_path / name, source, tokenizer=None, vocab_size=400, validation=0.3, workers=2
        )
    assert every_file(tmp_path / "out") == every_file(tmp_path / "again")
    kept = [text for text in documents if not is_held_out(text, 0.3)]
    train_bpe(kept, 400, tmp_path / "by-hand.json")
    trained = (tmp_path / "out" / "tokenizer.json").read_bytes()
    assert trained == (tmp_path / "by-hand.json").read_bytes()
    assert 257 < manifest["vocabulary"] <= 400


MEMORY = """
import resource, sys
from pathlib import Path
from tests.data.texts import prepared
if __name__ == "__main__":
    prepared(Path(sys.argv[2]), sys.argv[1], workers=2)
    # getrusage has this process begin with the size of the one that started it
    (peak,) = (line for line in Path("/proc/self/status").open() if line.startswith("VmHWM"))
    print(int(peak.split()[1]) // 1024)
    print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus(tmp_path):
    """MiB at the peak, of the parent and of the largest worker, for 16 and for 48 MB of text.

    Less than 16 MB do not fill the queues between the processes.
    """
    document = " ".join(texts(6))  # a page of parquet holds 1,024 of them, and is decoded as one
    program = tmp_path / "program.py"
    program.write_text(MEMORY)
    peaks = []
    for megabytes in (16, 48):
        count = megabytes * 10**6 // len(document.encode())
        documents = [f"{number} {document}" for number in range(count)]
        source = tmp_path / f"{megabytes}.parquet"
        write_parquet(source, documents, rows=10**6)
        done = subprocess.run(
            [sys.executable, str(program), str(source), str(tmp_path / f"out{megabytes}")],
            env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=200,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        peaks.append([int(word) for word in done.stdout.split()])
    for small, large in zip(*peaks, strict=True):
        assert large < small + 16, peaks


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_a_compressed_file_is_decompressed_as_it_is_read(tmp_path, ending):
    documents = [os.urandom(1000).hex() for _ in range(1000)]
    path = write_jsonl(tmp_path / f"a.jsonl.{ending}", documents)
    (source,) = find_sources([str(path)])
    with opened(source) as (stream, file):
        assert stream.read(1000) and file.tell() < source.bytes / 2


def test_ctrl_c_on_the_command_line_ends_with_130(tmp_path, small_chunks, monkeypatch, capsys):
    def interrupt(*_):
        os.kill(os.getpid(), signal.SIGINT)

    source = write_jsonl(tmp_path / "a.jsonl", texts(50))
    words = ["data", "prepare", str(source), "--out", str(tmp_path / "out"), "--tokenizer", "byte"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nanoscale.view.data_text.PreparationScreen.progress", interrupt)
        assert nanoscale_command([*words, "--workers", "1"]) == 130
    assert "continues from here" in capsys.readouterr().err
    monkeypatch.setattr("nanoscale.view.data_text._LINE_S", 0.0)
    assert nanoscale_command([*words, "--workers", "1", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["train"]["documents"] == 50
    assert "MB/s  ETA " in printed.err


@pytest.mark.parametrize(
    "kind",
    [pa.dictionary(pa.int32(), pa.string()), pa.dictionary(pa.int8(), pa.large_string()), pa.string_view()],
    ids=str,
)  # fmt: skip
def test_every_kind_of_text_column_is_read(tmp_path, kind):
    """Polars and pandas write categories and views where another program writes plain strings."""
    documents = [*texts(20), *texts(5)]
    column = pa.array(documents).cast(kind)
    try:
        parquet.write_table(pa.table({"text": column}), tmp_path / "a.parquet", row_group_size=7)
    except pa.ArrowNotImplementedError:
        pytest.skip(f"this pyarrow writes no {kind} into parquet")
    prepared(tmp_path / "out", tmp_path / "a.parquet")
    assert found(tmp_path / "out", "tokens") == pair(as_bytes(documents), code=8)


def test_a_nested_field_is_read_from_lines_and_tables(tmp_path):
    documents = texts(30)
    records = [{"id": n, "a": {"b": {"c": text}, "d": 1}} for n, text in enumerate(documents)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    parquet.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet", row_group_size=7)
    parquet.write_table(pa.table({"a.b.c": documents}), tmp_path / "plain.parquet")
    for name in ("a.jsonl", "a.parquet", "plain.parquet"):
        prepared(tmp_path / f"{name}.out", tmp_path / name, field="a.b.c")
        assert found(tmp_path / f"{name}.out", "tokens") == pair(as_bytes(documents), code=8)


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", ["json", "csv", "tar"])
def test_lists_of_records_and_csv_are_read(tmp_path, small_chunks, kind, ending):
    documents = [*texts(60), 'a "quoted", two\nlines', "x" * 200_000]
    path = tmp_path / f"a.{kind}{ending}"
    write_records(path, documents)
    prepared(tmp_path / "out", path, workers=2 if ending else 1)
    assert found(tmp_path / "out", "tokens") == pair(as_bytes(documents), code=8)


@pytest.mark.slow
def test_standard_input_is_a_source_and_the_same_one_is_not_prepared_again(tmp_path):
    documents = texts(40)
    raw = "<|>".join(documents).encode()
    words = ["data", "prepare", "-", "--tokenizer", "byte", "--separator", "<|>", "--out"]
    command = [sys.executable, "-m", "nanoscale", *words]
    (tmp_path / "temporary").mkdir()
    settings = {"cwd": tmp_path, "env": os.environ | {"TMPDIR": str(tmp_path / "temporary")}}
    for said, given, out, code in (
        ("40 documents", raw, "out", 0),
        ("is prepared already", raw, "out", 0),
        ("not the result of this request", raw + b" ", "out", 2),
        ("standard input: is empty", b"", "none", 2),
    ):
        done = subprocess.run(
            [*command, out], input=given, capture_output=True, check=False, **settings
        )
        shown = " ".join((done.stdout + done.stderr).decode().split())
        assert (done.returncode, said in shown) == (code, True), shown
        assert found(tmp_path / "out", "tokens") == pair(as_bytes(documents), code=8)
        assert not list((tmp_path / "temporary").iterdir())
    assert not list(tmp_path.glob("none*"))


def test_markdown_is_text(tmp_path):
    (tmp_path / "a.md").write_text("# One\n\nTwo")
    prepared(tmp_path / "out", f"{tmp_path}/*.md")
    assert found(tmp_path / "out", "tokens") == pair(as_bytes(["# One\n\nTwo"]), code=8)


def test_what_a_dictionary_repeats_goes_in_small_pieces(tmp_path, monkeypatch):
    """128 rows of one long text are a short column, and 128 long texts."""
    monkeypatch.setattr(chunks, "CHUNK", 5000)
    column = pa.array(["a" * 600] * 500).dictionary_encode()
    parquet.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    (source,) = find_sources([str(tmp_path / "a.parquet")])
    read = list(chunks.read_chunks(Reading((source,)), chunks.Cursor()))
    assert [len(chunk.content) for chunk in read] == [128, 128, 128, 116]
