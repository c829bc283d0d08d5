"""Descriptions of token files, compared with counts made by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nanoscale.cli.main import run as nanoscale
from nanoscale.common.errors import UserError
from nanoscale.data.tokens.files import open_tokens
from tests.data.texts import is_held_out, prepared, texts, write_datatrove, write_jsonl

DOCUMENTS = [[1, 2, 3], [70_000], [5] * 20]


def inspected(capsys, *words: str) -> tuple[int, dict]:
    code = nanoscale(["data", "inspect", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("prepared")
    prepared(place / "out", write_jsonl(place / "a.jsonl", texts(100)), validation=0.3)
    return place / "out"


def test_counts_lengths_and_samples(folder, capsys):
    code, document = inspected(capsys, str(folder), "--samples", "2")
    assert (code, document["problems"], document["kind"]) == (0, [], "prepared")
    for name, side in (("train", False), ("valid", True)):
        chosen = [text for text in texts(100) if is_held_out(text, 0.3) is side]
        lengths = sorted(len(text.encode()) + 1 for text in chosen)
        split = document["splits"][name]
        assert split["documents"] == split["ended_by_eos"] == len(chosen)
        assert split["tokens"] == sum(lengths)
        assert (split["smallest_token"], split["largest_token"]) == (9, 256)
        about = split["lengths"]
        assert (about["shortest"], about["longest"]) == (lengths[0], lengths[-1])
        assert about["median"] == lengths[(len(lengths) - 1) // 2]
        assert about["mean"] == pytest.approx(sum(lengths) / len(lengths))
        for row in about["histogram"]:
            inside = [length for length in lengths if row["from"] <= length < row["below"]]
            assert row["documents"] == len(inside)
        assert sum(row["documents"] for row in about["histogram"]) == len(chosen)
        samples = split["samples"]
        assert [one["document"] for one in samples] == [0, len(chosen) // 2]
        assert all(chosen[one["document"]].startswith(one["text"].rstrip("�")) for one in samples)


def test_a_models_vocabulary(folder, capsys):
    code, document = inspected(capsys, str(folder), "model=debug")
    assert (code, document["problems"]) == (0, [])
    code, document = inspected(capsys, str(folder), "model=debug", "model.vocab=256")
    assert code == 1
    assert (
        "256 tokens is smaller than the data's of 257; model.vocab=320" in document["problems"][0]
    )
    assert nanoscale(["data", "inspect", str(folder), "model=debug", "model.vocab=256"]) == 1
    assert "wrong: the model's vocabulary" in capsys.readouterr().out


def test_a_folder_that_was_changed(folder, capsys, tmp_path):
    manifest = json.loads((folder / "manifest.json").read_bytes())
    for name in ("tokens.bin", "tokens.idx"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    manifest["train"]["tokens"] += 1
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"tokenizer": "another"}))
    code, document = inspected(capsys, str(tmp_path))
    assert (code, len(document["problems"])) == (1, 2)


@pytest.mark.parametrize(
    ("letter", "about"), [("H", "a/b|2\n23\n23T"), ("I", "a/b\n24"), ("I", "")]
)
def test_datatrove(tmp_path, capsys, letter, about):
    documents = DOCUMENTS if letter == "I" else [[7], *DOCUMENTS[::2][:1], [65_535] * 19]
    path = tmp_path / "a.ds"
    write_datatrove(path, documents, letter, about)
    tokens = open_tokens("datatrove", path)
    assert [list(tokens[number]) for number in range(len(tokens))] == documents
    starts = [sum(map(len, documents[:number])) for number in range(4)]
    assert list(tokens.document_starts(0, 3)) == starts
    assert list(tokens.document_starts(1, 3)) == starts[1:]
    ends = [token for number, one in enumerate(documents) for token in [number] * len(one)]
    assert [tokens.index.document_at(place) for place in range(len(ends))] == ends
    assert tokens.index.tokenizer == ("a/b" if about else None)
    assert not tokens.tokens.flags.owndata
    code, document = inspected(capsys, str(path))
    assert (code, document["kind"]) == (0, "Datatrove")
    assert document["splits"]["train"]["documents"] == 3
    assert nanoscale(["data", "inspect", str(path)]) == 0
    assert "[70000]" in capsys.readouterr().out or letter == "H"


DAMAGE = {
    "cut": (lambda p: p.write_bytes(p.read_bytes()[:-2]), "bytes, and a.ds.index declares 24 tokens"),
    "empty": (lambda p: p.write_bytes(b""), "holds no token"),
    "no index": (lambda p: Path(f"{p}.index").unlink(), "a.ds.index"),
    "index cut": (lambda p: Path(f"{p}.index").write_bytes(b"1234"), "not ends of documents"),
    "order": (lambda p: write_datatrove(p, [[1] * 3], "H", "") or
              Path(f"{p}.index").write_bytes(b"\5" + b"\0" * 7 + b"\3" + b"\0" * 7), "not in order"),
    "size": (lambda p: Path(f"{p}.metadata").write_text("a|2\n24"), "declares 2 bytes per token"),
    "count": (lambda p: Path(f"{p}.metadata").write_text("a|4\n25"), "declares 25 tokens"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_datatrove_file(tmp_path, name):
    path = tmp_path / "a.ds"
    write_datatrove(path, DOCUMENTS, "I", "")
    damage, said = DAMAGE[name]
    damage(path)
    with pytest.raises(UserError, match=said) as caught:
        open_tokens("datatrove", path)
    assert caught.value.kind == "data"


def test_damaged_and_missing_files_are_one_error_each(folder, tmp_path, capsys):
    for name in ("tokens.bin", "tokens.idx"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    prefix = str(tmp_path / "tokens")
    assert inspected(capsys, f"{prefix}.bin")[0] == 0
    (tmp_path / "tokens.bin").write_bytes((folder / "tokens.bin").read_bytes()[:-2])
    for words, said in (
        ([prefix], "tokens.bin: it holds"),
        ([str(tmp_path / "none")], "missing token file"),
        ([str(tmp_path / "none.ds")], "missing token file"),
        ([str(folder), "--tokenizer", "no-such-file.json/x/y"], "--tokenizer: no-such-file"),
    ):
        assert nanoscale(["data", "inspect", *words]) == 2
        error = capsys.readouterr().err
        assert said in error and "Traceback" not in error
    (tmp_path / "tokens.idx").write_bytes((folder / "valid.idx").read_bytes())
    with pytest.raises(UserError, match="describes"):
        open_tokens("megatron", prefix)
