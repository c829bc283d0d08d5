"""Megatron-LM's .bin/.idx, read back by a reader of its own, and every kind of damage."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from nanoscale.common.errors import UserError
from nanoscale.data.tokens.files import open_tokens
from tests.support.token_files import write_indexed

DOCUMENTS = [[1, 2, 3], [], [65535], list(range(1000)), [7, 7]]


def write(prefix: Path, documents=DOCUMENTS, dtype=np.uint16) -> Path:
    write_indexed(prefix, documents, dtype)
    return prefix


def read_independently(prefix: Path) -> tuple[np.ndarray, list[np.ndarray], np.ndarray]:
    """Tokens, sequences and document index, as the format's description has them."""
    raw = Path(f"{prefix}.idx").read_bytes()
    assert raw[:9] == b"MMIDIDX\x00\x00"
    (version,) = struct.unpack("<Q", raw[9:17])
    assert version == 1
    (code,) = struct.unpack("<B", raw[17:18])
    names = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 6: "f8", 7: "f4", 8: "u2"}
    dtype = np.dtype("<" + names[code])
    sequences, documents = struct.unpack("<QQ", raw[18:34])
    sizes = np.frombuffer(raw, "<i4", sequences, 34)
    pointers = np.frombuffer(raw, "<i8", sequences, 34 + 4 * sequences)
    index = np.frombuffer(raw, "<i8", documents, 34 + 12 * sequences)
    assert len(raw) == 34 + 12 * sequences + 8 * documents
    content = Path(f"{prefix}.bin").read_bytes()
    found = [
        np.frombuffer(content, dtype, size, pointer)
        for size, pointer in zip(sizes, pointers, strict=True)
    ]
    return np.frombuffer(content, dtype), found, index


@pytest.mark.parametrize("dtype", ["u1", "i1", "i2", "i4", "i8", "u2"])
def test_another_reader_finds_every_bit(tmp_path, dtype):
    limits = np.iinfo(dtype)
    documents = [[limits.min, limits.max], [1], [], list(range(100))]
    tokens, sequences, index = read_independently(write(tmp_path / "a", documents, dtype))
    assert tokens.dtype == np.dtype("<" + dtype)
    assert [list(one) for one in sequences] == documents
    assert list(index) == [0, 1, 2, 3, 4]


def test_our_reader_finds_every_bit(tmp_path):
    tokens = open_tokens("megatron", write(tmp_path / "corpus.v1"))  # a prefix may hold a dot
    assert len(tokens) == 5
    assert [list(tokens[i]) for i in range(5)] == DOCUMENTS
    assert list(tokens.tokens) == [token for document in DOCUMENTS for token in document]
    assert list(tokens.document_starts(0, 5)) == [0, 3, 3, 4, 1004, 1006]
    assert list(tokens.document_starts(1, 3)) == [3, 3, 4]
    assert [tokens.index.document_start(i) for i in range(6)] == [0, 3, 3, 4, 1004, 1006]
    assert [tokens.index.document_at(i) for i in (0, 2, 3, 4, 1003, 1004, 1005)] == [
        0,
        0,
        2,
        3,
        3,
        4,
        4,
    ]
    with pytest.raises(IndexError):
        tokens[5]


def test_a_document_may_hold_several_sequences(tmp_path):
    lengths, documents = [2, 1, 3], [0, 2, 3]
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, 3, 3)
    body = struct.pack("<3i", *lengths) + struct.pack("<3q", 0, 8, 12)
    (tmp_path / "a.idx").write_bytes(header + body + struct.pack("<3q", *documents))
    (tmp_path / "a.bin").write_bytes(np.arange(6, dtype="<i4").tobytes())
    tokens = open_tokens("megatron", tmp_path / "a")
    assert [list(tokens[i]) for i in range(2)] == [[0, 1, 2], [3, 4, 5]]
    assert list(tokens.document_starts(0, 2)) == [0, 3, 6]
    assert [tokens.index.document_at(i) for i in range(6)] == [0, 0, 0, 1, 1, 1]


def test_the_tokens_are_mapped_and_read_only(tmp_path):
    tokens = open_tokens("megatron", write(tmp_path / "a")).tokens
    assert not tokens.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1


def patch(path: Path, place: int, content: bytes) -> None:
    raw = bytearray(path.read_bytes())
    raw[place : place + len(content)] = content
    path.write_bytes(raw)


def cut(path: Path, length: int) -> None:
    path.write_bytes(path.read_bytes()[:length])


def grow(path: Path, content: bytes) -> None:
    path.write_bytes(path.read_bytes() + content)


# a damage of a pair with 5 sequences, the file that is named, and words of the reason
DAMAGE = {
    "no idx": (lambda b, i: i.unlink(), "a.idx", "no such file"),
    "no bin": (lambda b, i: b.unlink(), "a.bin", "no such file"),
    "bin cut": (lambda b, i: cut(b, 100), "a.bin", "holds 100 bytes, and a.idx declares 2012"),
    "bin empty": (lambda b, i: cut(b, 0), "a.bin", "holds 0 bytes"),
    "bin of another idx": (lambda b, i: grow(b, b"12"), "a.idx", "describes 2012 bytes"),
    "idx empty": (lambda b, i: cut(i, 0), "a.idx", "does not start"),
    "idx cut in its header": (lambda b, i: cut(i, 20), "a.idx", "within its header"),
    "idx cut": (lambda b, i: cut(i, 90), "a.idx", "declares"),
    "idx grown": (lambda b, i: grow(i, b"\0"), "a.idx", "declares"),
    "multimodal": (lambda b, i: grow(i, b"\0" * 5), "a.idx", "multimodal"),
    "magic": (lambda b, i: patch(i, 0, b"X"), "a.idx", "does not start"),
    "version": (lambda b, i: patch(i, 9, b"\x02"), "a.idx", "version is 2"),
    "type": (lambda b, i: patch(i, 17, b"\x09"), "a.idx", "type code 9"),
    "floats": (lambda b, i: patch(i, 17, b"\x07"), "a.idx", "type code 7"),
    "huge count": (lambda b, i: patch(i, 18, b"\xff" * 8), "a.idx", "declares"),
    "negative length": (lambda b, i: patch(i, 37, b"\xff"), "a.idx", "negative length"),
    "lengths": (lambda b, i: patch(i, 34, b"\x04"), "a.idx", "do not match"),
    "first place": (lambda b, i: patch(i, 54, b"\x02"), "a.idx", "do not match"),
    "a later place": (lambda b, i: patch(i, 62, b"\x02"), "a.idx", "do not match"),
    "first document": (lambda b, i: patch(i, 94, b"\x01"), "a.idx", "do not cover"),
    "last document": (lambda b, i: patch(i, 134, b"\x04"), "a.idx", "do not cover"),
    "document order": (lambda b, i: patch(i, 102, b"\x03"), "a.idx", "not in order"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found_and_the_file_named(tmp_path, name):
    damage, file, reason = DAMAGE[name]
    write(tmp_path / "a")
    damage(tmp_path / "a.bin", tmp_path / "a.idx")
    with pytest.raises(UserError) as caught:
        open_tokens("megatron", tmp_path / "a")
    assert caught.value.kind == "data"
    assert str(tmp_path / file) in caught.value.message
    assert reason in caught.value.violations[0].message


def test_a_pair_without_a_token_is_refused(tmp_path):
    nothing: list[list[list[int]]] = [[], [[], []]]
    for documents in nothing:
        with pytest.raises(UserError, match=r"a\.bin: it holds no token"):
            open_tokens("megatron", write(tmp_path / "a", documents))


def test_damage_behind_the_first_block_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr("nanoscale.data.tokens.files._BLOCK", 2)
    assert len(open_tokens("megatron", write(tmp_path / "a"))) == 5
    for place, content in ((54 + 8 * 2, b"\x09"), (94 + 8 * 2, b"\x00"), (94 + 8 * 3, b"\x05")):
        write(tmp_path / "a")
        patch(tmp_path / "a.idx", place, content)
        with pytest.raises(UserError, match="damaged"):
            open_tokens("megatron", tmp_path / "a")


def test_a_path_with_its_ending_is_explained(tmp_path):
    write(tmp_path / "a")
    with pytest.raises(UserError) as caught:
        open_tokens("megatron", tmp_path / "a.bin")
    assert "without .bin or .idx" in caught.value.violations[0].message
