"""Unsuitable input of data prepare: one clear error each, and nothing half-written."""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from nanoscale.cli.main import run as nanoscale
from nanoscale.common.errors import UserError, user_name
from nanoscale.data.prepare import chunks, encode, preparation
from nanoscale.data.prepare.sources import Reading, find_sources
from tests.data.texts import (
    as_bytes,
    found,
    pair,
    prepared,
    tar_of,
    texts,
    write_jsonl,
    write_parquet,
    write_records,
)

GOOD = texts(6)


@pytest.fixture(autouse=True)
def nothing_is_committed_before_the_end(monkeypatch):
    monkeypatch.setattr(preparation, "COMMIT_S", float("inf"))


def line(text: object) -> bytes:
    return json.dumps({"text": text}).encode() + b"\n"


def damaged_parquet(path: Path) -> None:
    """Change a byte of a page; frame and schema stay complete."""
    table = pa.table({"text": [f"{i} {text}" for i in range(50) for text in GOOD]})
    parquet.write_table(
        table,
        path,
        row_group_size=100,
        compression="zstd",
        use_dictionary=False,
        write_page_checksum=True,
    )
    raw = bytearray(path.read_bytes())
    place = parquet.read_metadata(path).row_group(1).column(0)
    raw[place.data_page_offset + place.total_compressed_size - 50] ^= 0xFF
    path.write_bytes(raw)


def not_utf8_parquet(path: Path) -> None:
    column = pa.array([b"good", b"caf\xe9"], pa.binary()).view(pa.string())
    parquet.write_table(pa.table({"text": column}), path)


# how a file is made, and words of its error
BAD = {
    "utf8.jsonl": (lambda p: p.write_bytes(line("a") + b'{"text": "caf\xe9"}\n'),
                   ":2: is not UTF-8: byte 0xe9"),
    "utf8.txt": (lambda p: p.write_bytes(b"a\nb\ncaf\xe9"), "1: is not UTF-8: byte 0xe9 in line 3"),
    "utf8.parquet": (not_utf8_parquet, ", row 2: is not UTF-8"),
    "field.jsonl": (lambda p: p.write_bytes(line("a") * 2 + b'\n{"body": "b"}\n'),
                    ":4: has no field 'text' (--field); its fields: body"),
    "number.jsonl": (lambda p: p.write_bytes(line(7)), ":1: its field 'text' holds a number"),
    "null.jsonl": (lambda p: p.write_bytes(line(None)), ":1: its field 'text' holds null"),
    "list.jsonl": (lambda p: p.write_bytes(b"[1]\n"), ":1: is JSON, but not an object"),
    "json.jsonl": (lambda p: p.write_bytes(line("a") + b'{"text": "b'), ":2: is not JSON: "),
    "half.jsonl": (lambda p: p.write_bytes(b'{"text": "\\ud800"}'), ":1: has half of a surrogate"),
    "empty.jsonl": (lambda p: p.touch(), "empty.jsonl: is empty"),
    "empty.txt": (lambda p: p.touch(), "empty.txt: is empty"),
    "empty.jsonl.gz": (lambda p: p.write_bytes(gzip.compress(b"")), "empty.jsonl.gz: is empty"),
    "empty.parquet": (lambda p: write_parquet(p, []), "empty.parquet: is empty"),
    "none.parquet": (lambda p: write_parquet(p, ["a", None]), ", row 2: is null"),
    "noise.parquet": (lambda p: p.write_bytes(b"PAR1" + b"x" * 100), "is not a readable parquet file"),
    "page.parquet": (damaged_parquet, "cannot be read from here on"),
    "column.parquet": (lambda p: parquet.write_table(pa.table({"body": ["a"]}), p),
                       "has no column 'text' (--field); its columns: body"),
    "text.parquet": (lambda p: parquet.write_table(pa.table({"text": [{"a": "b"}]}), p),
                     "its column 'text' holds struct"),
    "pair.jsonl": (lambda p: p.write_bytes(b'{"prompt": "a", "completion": "b"}\n'),
                   "; chats are prepared with --chat"),
    "object.json": (lambda p: p.write_text('{"text": "a"}'), "is not a list of records"),
    "cut.json": (lambda p: p.write_text('[{"text": "a"}, {"te'), "cannot be read from here on"),
    "none.json": (lambda p: p.write_text("[]"), "none.json: is empty"),
    "number.json": (lambda p: p.write_text('[{"text": "a"}, {"text": 1}]'),
                    ", row 2: its field 'text' holds a number"),
    "column.csv": (lambda p: p.write_text("a;b\n1;2\n"),
                   "has no column 'text' (--field); its columns: a;b"),
    "ragged.csv": (lambda p: p.write_text("text,id\na,1\nb\nc,2\n"),
                   ", row 2: has 1 values, and the header names 2 columns"),
    "quote.csv": (lambda p: p.write_text('text,id\n"a"b,1\n'), "is not CSV: "),
    "utf8.csv": (lambda p: p.write_bytes(b"text\ncaf\xe9\n"), "cannot be read"),
    "header.csv": (lambda p: p.write_text("text,id\n"), "header.csv: is empty"),
    "noise.tar": (lambda p: p.write_bytes(b"x" * 2000), "is not a whole tar file: "),
    "cut.tar": (lambda p: p.write_bytes(tar_of([("a.txt", "a"), ("b.txt", "b" * 999)])[:1600]),
                "is not a whole tar file: "),
    "image.tar": (lambda p: p.write_bytes(tar_of([("a.txt", "a"), ("b.jpg", "b"), ("b.cls", "1")])),
                  ", row 2: "),
    "list.tar": (lambda p: p.write_bytes(tar_of([("a.json", "[1]"), ("b.txt", "b")])),
                 ", row 1: its .json is not an object"),
    "type.parquet": (lambda p: parquet.write_table(pa.table({"text": [1]}), p),
                     "its column 'text' holds int64"),
    "cut.jsonl.gz": (lambda p: p.write_bytes(gzip.compress(line("a") * 999)[:-9]),
                     "cannot be read from here on: Truncated"),
    "noise.jsonl.zst": (lambda p: p.write_bytes(b"x" * 100), ":1: cannot be read from here on"),
    "long.jsonl": (lambda p: p.write_bytes(line("x" * 5000) + line("a")), ":1: this document is longer"),
    "long.txt": (lambda p: p.write_text("x" * 9000), "--separator TEXT sets the text between"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_it_is_refused_with_its_place_and_nothing_is_left(tmp_path, name, capsys, monkeypatch):
    if name.startswith("long"):
        monkeypatch.setattr(chunks, "LONGEST", 4000)
        monkeypatch.setattr(chunks, "CHUNK", 500)
    make, said = BAD[name]
    make(tmp_path / name)
    good = write_jsonl(tmp_path / "good.jsonl", GOOD)
    words = [str(good), str(tmp_path / name), "--tokenizer", "byte", "--workers", "1"]
    assert nanoscale(["data", "prepare", *words, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert f"error: {tmp_path / name}" in error
    assert said in error
    assert "--bad skip" in error
    assert "Traceback" not in error
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, "good.jsonl"])
    (advice,) = re.findall(r"skip them with (--bad \w+)", error)
    typed = [*words, *advice.split(), "--out", str(tmp_path / "out")]
    assert nanoscale(["data", "prepare", *typed]) == 0


def test_an_empty_file_alone_is_answered_with_what_to_name(tmp_path, capsys):
    (tmp_path / "empty.txt").touch()
    words = [str(tmp_path / "empty.txt"), "--tokenizer", "byte", "--out", str(tmp_path / "out")]
    assert nanoscale(["data", "prepare", *words]) == 2
    assert "empty.txt: is empty\n  remedy: name files with texts\n" in capsys.readouterr().err


@pytest.mark.parametrize("argument", ["texts", "texts/*.txt", "texts/a.txt", "."])
def test_what_may_not_be_read_is_named_with_the_user(argument, tmp_path, capsys, monkeypatch):
    """Also a folder inside the named one, whose texts would be left out without a word."""
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    for name in ("texts/a.txt", "b.txt"):
        Path(name).write_text("a")

    def deny(module, name):  # the tests may run as root, who may read everything
        real = getattr(module, name)

        def refuse(path=".", *rest, **options):
            if Path(path).absolute().is_relative_to(tmp_path / "texts"):
                raise PermissionError(13, "Permission denied", str(path))
            return real(path, *rest, **options)

        monkeypatch.setattr(module, name, refuse)

    for module, name in ((os, "scandir"), (os, "listdir"), (Path, "open")):
        deny(module, name)
    assert nanoscale(["data", "prepare", argument, "--tokenizer", "byte", "--out", "out"]) == 2
    error = capsys.readouterr().err
    assert "texts" in error and f": Permission denied for the user {user_name()}\n" in error


@pytest.mark.parametrize("name", BAD)
def test_it_is_left_out_and_counted_where_that_is_asked_for(tmp_path, name, monkeypatch):
    if name.startswith("long"):
        monkeypatch.setattr(chunks, "LONGEST", 4000)
        monkeypatch.setattr(chunks, "CHUNK", 500)
    make, said = BAD[name]
    make(tmp_path / name)
    good = write_jsonl(tmp_path / "good.jsonl", GOOD)
    manifest = prepared(tmp_path / "out", tmp_path / name, good, skip_bad=True)
    assert manifest["bad"] == 1
    (record,) = manifest["bad_records"]
    assert said in f"{record['place']}: {record['what']}"
    tokens, _ = found(tmp_path / "out", "tokens")
    assert tokens.endswith(pair(as_bytes(GOOD), code=8)[0])
    if name == "field.jsonl":
        assert found(tmp_path / "out", "tokens") == pair(as_bytes(["a", "a", *GOOD]), code=8)


def test_a_document_that_is_too_long_is_found_wherever_pieces_end(tmp_path, monkeypatch):
    """Both by the reader, who passes over it, and by the worker, who has it whole."""
    monkeypatch.setattr(chunks, "LONGEST", 4000)
    monkeypatch.setattr(encode, "LONGEST", 4000)
    source = tmp_path / "a.txt"
    source.write_text("one\n\n" + "x\n" * 2500 + "\ntwo\n\nthree")
    seen = []
    for size in (7, 100, 4096, 10**6):
        monkeypatch.setattr(chunks, "CHUNK", size)
        reading = Reading((_source(source),), separator="\n\n")
        read = list(chunks.read_chunks(reading, chunks.Cursor()))
        documents = [encode.Documents(chunk, reading) for chunk in read]
        good = [document.text for one in documents for document, _ in one]
        seen.append((good, [bad for one in documents for bad in one.bad]))
        assert read[-1].after == chunks.Cursor(0, source.stat().st_size, 2506)
    assert all(one == seen[0] for one in seen)
    assert seen[0][0] == ["one", "two", "three"]
    assert [bad.place for bad in seen[0][1]] == [f"{source}:3"]


def _source(path: Path):
    return find_sources([str(path)])[0]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.csv", "a.parquet"])
def test_reading_goes_on_from_every_cursor(tmp_path, monkeypatch, name):
    monkeypatch.setattr(chunks, "CHUNK", 400)
    documents = [f"{text}\u2028" for text in texts(300)]
    write = {".parquet": write_parquet, ".json": write_records, ".csv": write_records}.get(
        Path(name).suffix, write_jsonl
    )
    sources = [_source(write(tmp_path / name, documents))]
    reading = Reading(tuple(sources))

    def rest(cursor: chunks.Cursor) -> list[str]:
        read = chunks.read_chunks(reading, cursor)
        found = (encode.Documents(chunk, reading) for chunk in read)
        return [document.text for documents in found for document, _ in documents]

    whole = list(chunks.read_chunks(reading, chunks.Cursor()))
    assert len(whole) > 2
    assert rest(chunks.Cursor()) == documents
    for chunk in whole[::5]:
        after = rest(chunk.after)
        assert after == documents[len(documents) - len(after) :]
        assert chunk.after.record == len(documents) - len(after) + 1


def test_empty_texts_are_no_documents(tmp_path):
    source = tmp_path / "a.jsonl"
    source.write_bytes(line("") + b"\n" + line("a") + line(" \n") + line("b"))
    manifest = prepared(tmp_path / "out", source)
    assert (manifest["empty"], manifest["bad"]) == (2, 0)
    assert found(tmp_path / "out", "tokens") == pair(as_bytes(["a", "b"]), code=8)
    source.write_bytes(line(""))
    with pytest.raises(UserError, match="no document"):
        prepared(tmp_path / "none", source)
    assert not list(tmp_path.glob("none*"))


def test_what_is_refused_may_go_on_with_skip(tmp_path, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK", 300)
    monkeypatch.setattr(preparation, "COMMIT_S", 0.0)
    source = tmp_path / "a.jsonl"
    source.write_bytes(b"".join(map(line, texts(50))) + b"nothing\n" + line("end"))
    with pytest.raises(UserError, match=":51: is not JSON") as caught:
        prepared(tmp_path / "out", source)
    assert "out.part" in caught.value.violations[0].remedy
    assert not (tmp_path / "out").exists()
    manifest = prepared(tmp_path / "out", source, skip_bad=True)
    assert manifest["bad"] == 1
    assert found(tmp_path / "out", "tokens") == pair(as_bytes([*texts(50), "end"]), code=8)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["none.jsonl"], "none.jsonl: there is no such file"),
        (["*.parquet"], "*.parquet: no readable file there"),
        (["a.tsv"], "a.tsv cannot be read; supported are .txt, .md, .jsonl, .json, .csv"),
        (["a.jsonl", "./*.jsonl"], "is named twice"),
        (["hf:./nowhere"], "hf:./nowhere: there is no such folder"),
        (["a.jsonl", "--tokenizer", "nowhere.json"], "--tokenizer: nowhere.json"),
        (["a.jsonl", "--tokenizer", "a.jsonl"], "cannot be read as a tokenizer.json"),
        (["a.jsonl", "--tokenizer", "a.model"], "it is not a sentencepiece model"),
        (["a.jsonl", "--tokenizer", "byte", "--train-tokenizer"], "give --tokenizer or"),
        (["a.jsonl", "--validation", "0.001", "--tokenizer", "byte"], "holds out none of 6"),
        (["a.jsonl", "--separator", "", "--tokenizer", "byte"], "--separator is empty"),
        (["a.jsonl", "--eos", "x", "--tokenizer", "byte"], "--eos names a token"),
    ],
)  # fmt: skip
def test_requests_that_are_wrong(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    write_jsonl(Path("a.jsonl"), GOOD)
    Path("a.tsv").write_text("a")
    Path("a.model").write_bytes(b"\n\x0e\n\x05<unk>")
    tokenizer = [] if "--tokenizer" in words else ["--tokenizer", "byte"]
    code = nanoscale(["data", "prepare", *words, *tokenizer, "--out", "out", "--workers", "1"])
    error = capsys.readouterr().err
    assert (code, "Traceback" in error) == (2, False), error
    assert said in " ".join(error.split())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "a.model", "a.tsv"]


def test_skipping_is_advised_only_if_something_is_left(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("a.csv").write_text("body\nto be\n")
    write_jsonl(Path("b.jsonl"), GOOD)
    prepare = ["data", "prepare", "--tokenizer", "byte", "--out", "out", "--workers", "1"]
    for sources, skips in ((["a.csv"], False), (["a.csv", "b.jsonl"], True)):
        assert nanoscale([*prepare, *sources]) == 2
        assert ("--bad skip" in capsys.readouterr().err) is skips
        assert nanoscale([*prepare, *sources, "--bad", "skip"]) == (0 if skips else 2)


def test_without_a_word_on_tokenizers(tmp_path, capsys):
    source = write_jsonl(tmp_path / "a.jsonl", GOOD)
    assert nanoscale(["data", "prepare", str(source), "--out", str(tmp_path / "out")]) == 2
    assert "--tokenizer byte or --tokenizer PATH/tokenizer.json" in capsys.readouterr().err


def test_the_sources_are_a_dataset(tmp_path):
    datasets = pytest.importorskip("datasets")
    documents = texts(300)
    made = datasets.Dataset.from_dict({"text": documents, "n": np.arange(300)})
    made.save_to_disk(str(tmp_path / "plain"))
    datasets.DatasetDict({"train": made, "test": made.select(range(9))}).save_to_disk(
        str(tmp_path / "splits")
    )
    for words, wanted in (
        (f"hf:{tmp_path}/plain", documents),
        (f"hf:{tmp_path}/splits", documents),
        (f"hf:{tmp_path}/splits:test", documents[:9]),
    ):
        out = tmp_path / f"out{len(wanted)}{Path(words).name}"
        prepared(out, words)
        assert found(out, "tokens") == pair(as_bytes(wanted), code=8)
    with pytest.raises(UserError, match="has no column 'body'"):
        prepared(tmp_path / "out", f"hf:{tmp_path}/plain", field="body")


def test_a_folder_of_datasets_has_the_split_that_is_asked_for(tmp_path, monkeypatch, capsys):
    datasets = pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    made = datasets.Dataset.from_dict({"text": texts(3)})
    made.save_to_disk("plain")
    datasets.Dataset.from_dict({"text": texts(3)}, split="valid").save_to_disk("named")
    datasets.DatasetDict({"valid": made, "test": made}).save_to_disk("splits")
    command = ["data", "prepare", "--tokenizer", "byte", "--workers", "1", "--out"]
    for source, said, instead in (
        ("hf:plain:test", "has no split test: it is one split, without a name", ["hf:plain"]),
        ("hf:named:test", "has no split test: its only split is valid", ["hf:named"]),
        ("hf:splits", "has no split train: it holds valid, test", ["hf:splits:valid", "hf:splits:test"]),
        ("hf:splits:en:test", "has no configuration en", ["hf:splits:test"]),
        ("hf:splits:en:x:test", "has more parts than NAME:CONFIG:SPLIT", []),
    ):  # fmt: skip
        capsys.readouterr()
        assert nanoscale([*command, "out", source]) == 2, source
        error = " ".join(capsys.readouterr().err.split())
        assert f"{source}: {said}" in error and not Path("out").exists()
        for number, word in enumerate(instead):
            assert word in error
            out = f"{source}-{number}".replace(":", "-")
            assert nanoscale([*command, out, word]) == 0, word
    assert nanoscale([*command, "out", "hf:named:valid"]) == 0


def test_what_was_begun_with_other_settings_is_begun_anew_as_advised(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "good.jsonl", GOOD)
    words = ["data", "prepare", "good.jsonl", "--tokenizer", "byte", "--workers", "1"]
    words += ["--out", "a corpus"]
    part = tmp_path / "a corpus.part"
    part.mkdir()
    (part / "request.json").write_text('{"seed": 1}')
    assert nanoscale(words) == 2
    (command,) = re.findall(r"start again: (rm .*)", capsys.readouterr().err)
    subprocess.run(shlex.split(command), check=True)
    assert nanoscale(words) == 0
    assert not part.exists()
