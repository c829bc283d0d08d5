"""Raw tokens and arrays of numpy.save, compared with the same documents in .bin and .idx."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nanoscale.cli.main import run as nanoscale
from nanoscale.common.errors import UserError
from nanoscale.config.composing.compose import compose
from nanoscale.config.rules import Devices, check
from nanoscale.data.dataset import open_data
from nanoscale.data.tokens.files import open_tokens
from tests.support.token_files import write_indexed

EOS = 257
"""Bytes 1, 1: in 2-byte tokens it also stands across tokens that end and begin with 1."""
DOCUMENTS = [[256, 1, 5, EOS], [EOS], [*range(2, 90), EOS], [300, 1, 1, EOS], [*range(9, 200), 7]]
FLAT = [token for document in DOCUMENTS for token in document]


def write(path: Path, form: str) -> None:
    if form.startswith("raw"):
        path.write_bytes(np.array(FLAT, f"<{form[3:]}").tobytes())
    else:
        with path.open("wb") as stream:
            np.save(stream, np.array(FLAT, f"<{form}"))


@pytest.mark.parametrize("form", ["rawu2", "rawu4", "u2", "u4", "i4", "i8"])
def test_samples_are_those_of_the_same_tokens_in_another_format(tmp_path, form):
    write(tmp_path / "a.npy", form)
    write_indexed(tmp_path / "a", DOCUMENTS)
    tokens = open_tokens("npy", tmp_path / "a.npy", EOS)
    other = open_tokens("megatron", tmp_path / "a")
    assert [list(tokens[number]) for number in range(len(tokens))] == DOCUMENTS
    for token in range(len(FLAT)):
        assert tokens.index.document_at(token) == other.index.document_at(token)
        assert tokens.index.start_of(token) == other.index.start_of(token)
    assert not tokens.tokens.flags.owndata

    def batches(*words: str) -> list[list[int]]:
        given = ("recipe=debug", "data.valid_fraction=0.3", "train.seq_len=32", *words)
        config = check(compose([*given, "data.packing=whole"]), Devices("cpu", 1))
        opened = open_data(config.data, config.train, config.model.vocab)
        loaders = [opened.train, opened.valid[0].loader]
        return [it.batch([n]).inputs[0].tolist() for it in loaders for n in range(len(it))]

    npy = batches("data=npy", f"data.path={tmp_path}/a.npy", f"data.eos={EOS}")
    assert npy == batches("data=megatron", f"data.path={tmp_path}/a")


def test_inspect_divides_documents_at_the_given_token(tmp_path, capsys):
    write(tmp_path / "a.npy", "rawu2")
    words = ["data", "inspect", str(tmp_path / "a.npy"), "data=npy", f"data.eos={EOS}"]
    assert nanoscale(words) == 0
    shown = capsys.readouterr().out
    assert "(npy, uint16)" in shown and "train: 5 documents" in shown


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "holds no token"),
        (b"abc", "3 bytes, which are not 1 tokens of 2 bytes"),
        (b"\x93NUMPY\1\0", "4 tokens"),
        (b"\x93NUMPY\1\0\6\0{'a'}\n", "its header is not one"),
        (b"\x93NUMPY\1\0\x26\0{'descr': '<f4',     'shape': (1,), }    \n", "its header is not one"),
        (b"\x93NUMPY\1\0\x26\0{'descr': '<u2',     'shape': (7,), }    \n12", "not 7 tokens"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_refused(tmp_path, content, said):
    (tmp_path / "a.npy").write_bytes(content)
    if said == "4 tokens":  # eight bytes that only begin as a header are tokens
        assert len(open_tokens("npy", tmp_path / "a.npy").tokens) == 4
        return
    with pytest.raises(UserError, match=said):
        open_tokens("npy", tmp_path / "a.npy")


def test_the_end_of_text_must_be_given_and_fit(tmp_path):
    write(tmp_path / "a.npy", "rawu2")
    words = ["recipe=debug", "data=npy", f"data.path={tmp_path}/a.npy"]
    for more, said in (
        ([], r"data\.eos"),
        (["data.eos=65536"], "does not fit into its tokens of 2 bytes"),
    ):
        with pytest.raises(UserError, match=said):
            check(compose([*words, *more]), Devices("cpu", 1))
