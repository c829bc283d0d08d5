"""Text to ids and back, and which token ends a document."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from tokenizers import Regex, decoders, normalizers
from tokenizers import Tokenizer as Native

import nanoscale
from nanoscale.common.errors import UserError
from nanoscale.data.prepare import chat
from nanoscale.data.tokens.tokenizer import END, ByteTokenizer, _longest, load, train_bpe

TEXTS = [
    "def add(a, b):\n    return a + b\n",
    "class Naïve:\n    '''Grüße 🙂'''\n",
    f"marker = '{END}'\n",
] * 20


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    return train_bpe(TEXTS, 320, path), path


def test_bytes_are_their_own_ids():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("aé") == [97, 0xC3, 0xA9]
    assert tokenizer.decode([97, 0xC3, 0xA9, tokenizer.eos]) == "aé"
    documents = [document.tolist() for document in tokenizer.encode_documents(["a", "é", ""])]
    assert documents == [[97, 256], [0xC3, 0xA9, 256], [256]]


def test_bytes_that_are_no_text_are_replaced():
    # a model with a padded vocabulary may say 300
    assert ByteTokenizer().decode([97, 0xC3, 98, 300, 99]) == "a�b�c"


def test_bpe_gives_back_every_text(bpe):
    tokenizer, _ = bpe
    for text in [*TEXTS[:3], "unseen: \x00 \x7f ☃ 漢字\r\n\t", ""]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(TEXTS[0])) < len(TEXTS[0]) / 2
    assert 257 <= tokenizer.vocab_size <= 320
    assert tokenizer.decode([*tokenizer.encode("a"), tokenizer.eos, 10**6]) == "a"


def test_bpe_documents_end_with_eos_and_hold_it_nowhere_else(bpe):
    tokenizer, _ = bpe
    documents = list(tokenizer.encode_documents(TEXTS))
    assert len(documents) == len(TEXTS)
    for text, document in zip(TEXTS, documents, strict=True):
        assert document.tolist() == [*tokenizer.encode(text), tokenizer.eos]
        assert tokenizer.eos not in document[:-1]


def test_bpe_training_repeats_itself_in_another_process(bpe, tmp_path):
    _, path = bpe
    script = (
        "import sys, json, pathlib\n"
        "from nanoscale.data.tokens.tokenizer import train_bpe\n"
        "train_bpe(json.loads(sys.argv[1]), 320, pathlib.Path(sys.argv[2]))\n"
    )
    other = tmp_path / "other.json"
    root = str(Path(nanoscale.__file__).parents[1])
    environment = {"PYTHONPATH": root, "RAYON_NUM_THREADS": "1"}
    command = [sys.executable, "-c", script, json.dumps(TEXTS), str(other)]
    subprocess.run(command, env=environment, check=True, timeout=60)
    assert other.read_bytes() == path.read_bytes()


def rename_end(path: Path, target: Path, name: str) -> Path:
    target.write_text(path.read_text().replace(END, name))
    return target


def test_a_file_is_loaded_with_its_own_end_token(bpe, tmp_path):
    tokenizer, path = bpe
    assert load(path).encode(TEXTS[1]) == tokenizer.encode(TEXTS[1])
    assert load(rename_end(path, tmp_path / "a.json", "</s>")).eos == tokenizer.eos
    unknown = rename_end(path, tmp_path / "b.json", "<fin>")
    with pytest.raises(UserError, match="none of the known end-of-document tokens"):
        load(unknown)
    for named in ("<fin>", {"content": "<fin>"}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": named}))
        assert load(unknown).eos == tokenizer.eos


def test_files_that_are_no_tokenizers_are_named(tmp_path):
    bad = tmp_path / "tokenizer.json"
    with pytest.raises(UserError, match=r"tokenizer\.json: there is no such file") as caught:
        load(bad)
    assert caught.value.violations[0].key == "data.tokenizer"
    bad.write_text("{}")
    with pytest.raises(UserError, match="cannot be read as a tokenizer"):
        load(bad)


def repeated(times, pattern="a", content="a" * 100):
    return normalizers.Sequence([normalizers.Replace(pattern, content)] * times)


@pytest.mark.parametrize(
    ("normalizer", "decoder", "characters"),
    [
        (repeated(5), None, "10,000,000,000"),
        (repeated(8, Regex("(?=a)"), "b"), None, "256"),
        (repeated(2, Regex("a{2}")), None, "2,500"),
        (None, decoders.Sequence([decoders.Replace("a", "a" * 100)] * 2), "10,000"),
        (repeated(9, Regex(" {2,}"), " "), decoders.Replace("▁", " "), None),
        (normalizers.Sequence([normalizers.Prepend("▁"), repeated(1, " ", "▁")]), None, None),
    ],
)
def test_a_tokenizer_that_makes_texts_much_longer_is_refused(
    bpe, tmp_path, normalizer, decoder, characters
):
    """The library aborts the process when memory runs out."""
    native = Native.from_file(str(bpe[1]))
    native.normalizer, native.decoder = normalizer, decoder or native.decoder
    native.save(str(tmp_path / "tokenizer.json"))
    refused = pytest.raises(UserError, match=f"makes up to {characters} characters of one")
    for read in (load, chat._native):
        with nullcontext() if characters is None else refused:
            assert read(tmp_path / "tokenizer.json").encode("a  b")


def test_a_map_of_sentencepiece_is_as_long_as_its_longest_text():
    assert _longest((8).to_bytes(4, "little") + bytes(8) + b"ab\0abcdef\0") == 6


def test_bytes_need_no_library():
    script = (
        "import sys, nanoscale.data\n"
        "from nanoscale.data.tokens.tokenizer import ByteTokenizer\n"
        "ByteTokenizer().decode(ByteTokenizer().encode('a'))\n"
        "assert not {'torch', 'tokenizers'} & set(sys.modules)\n"
    )
    root = str(Path(nanoscale.__file__).parents[1])
    command = [sys.executable, "-c", script]
    subprocess.run(command, env={"PYTHONPATH": root}, check=True, timeout=60)


def test_bytes_with_many_ends_are_decoded():
    ids = [*b"a", ByteTokenizer.eos] * 5000
    assert ByteTokenizer().decode(ids) == "a" * 5000
    assert ByteTokenizer().decode(ids, keep_special=True) == f"a{END}" * 5000
    cut = [0xC3, ByteTokenizer.eos, 0xA9]  # an end within a character
    assert ByteTokenizer().decode(cut) == "é"
    assert ByteTokenizer().decode(cut, keep_special=True) == f"\ufffd{END}\ufffd"
