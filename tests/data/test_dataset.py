"""Opening the data of a configuration."""

from __future__ import annotations

import sysconfig
from dataclasses import replace

import numpy as np
import pytest

from nanoscale.common.errors import UserError
from nanoscale.config.schema import Data, Train
from nanoscale.data import open_data
from nanoscale.data.tokens.tokenizer import ByteTokenizer, train_bpe
from tests.support.token_files import write_indexed

TRAIN = Train(seq_len=16, seed=1)


@pytest.fixture
def library(tmp_path, monkeypatch) -> Data:
    folder = tmp_path / "lib"
    folder.mkdir()
    (folder / "os.py").write_text("import sys\n" * 20)
    for i in range(30):
        (folder / f"m{i}.py").write_text(f"def f_{i}(value):\n    return value + {i}\n" * 3)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(folder))
    return Data(cache_dir=str(tmp_path / "cache"), valid_fraction=0.1)


def megatron(tmp_path, documents, **keys) -> Data:
    write_indexed(tmp_path / "mine", documents, np.int32)
    return Data(source="megatron", path=str(tmp_path / "mine"), **{"valid_fraction": 0.0, **keys})


def wrong(data: Data, train: Train = TRAIN, vocab: int = 320):
    with pytest.raises(UserError) as caught:
        open_data(data, train, vocab)
    assert caught.value.kind == "data"
    return caught.value.violations[0]


def test_the_embedded_corpus(library):
    opened = open_data(library, TRAIN, 257)
    assert isinstance(opened.tokenizer, ByteTokenizer)
    batch = next(opened.train.micro_batches(0, 4, 0, 1, 4))
    assert batch.inputs.shape == batch.targets.shape == (4, 16)
    assert "value" in opened.tokenizer.decode(opened.train.batch(range(10)).inputs.reshape(-1))
    assert len(opened.valid[0].loader) > 3
    for words in ("31 documents", "training samples", "for validation", "tokens.bin"):
        assert words in opened.description
    assert open_data(library, TRAIN, 257).fingerprint == opened.fingerprint


def test_training_and_validation_share_no_document(library):
    opened = open_data(library, TRAIN, 257)
    seen = opened.tokenizer.decode(opened.train.batch(range(len(opened.train))).inputs.reshape(-1))
    valid = opened.valid[0].loader
    held = opened.tokenizer.decode(valid.batch(range(len(valid))).inputs.reshape(-1))
    names = {f"def f_{i}(value)" for i in range(30)}
    assert {name for name in names if name in held}
    assert not {name for name in names if name in held and name in seen}


def test_validation_that_is_too_small_matters_only_if_it_is_asked_for(library):
    for fraction in (0.0, 0.001):
        data = Data(cache_dir=library.cache_dir, valid_fraction=fraction)
        opened = open_data(data, TRAIN, 257)
        assert not opened.valid
        assert "none for validation" in opened.description
        assert wrong(data, Train(seq_len=16, eval_every=5)).key == "data.valid_fraction"


def test_a_file_of_tokens(tmp_path):
    data = megatron(tmp_path, [list(range(100)), list(range(100))], valid_fraction=0.3)
    opened = open_data(data, TRAIN, 100)
    assert (len(opened.train), len(opened.valid[0].loader)) == (6, 6)
    assert opened.valid[0].loader.batch([0]).inputs.tolist() == [list(range(16))]
    assert opened.valid[0].loader.batch([0]).targets.tolist() == [list(range(1, 17))]
    other = megatron(tmp_path, [list(range(100)), [*range(99), 5]], valid_fraction=0.3)
    assert open_data(other, TRAIN, 100).fingerprint != opened.fingerprint


def test_a_files_tokenizer(tmp_path):
    assert isinstance(
        open_data(megatron(tmp_path, [[256] * 50]), TRAIN, 320).tokenizer, ByteTokenizer
    )
    assert open_data(megatron(tmp_path, [[257] * 50]), TRAIN, 320).tokenizer is None
    wanted = Train(seq_len=16, sample_tokens=10)
    assert wrong(megatron(tmp_path, [[257] * 50]), wanted).key == "data.tokenizer"
    assert wrong(megatron(tmp_path, [[1] * 50], tokenizer="bpe")).key == "data.tokenizer"
    train_bpe(["some text " * 9], 270, tmp_path / "t.json")
    data = megatron(tmp_path, [[1] * 50], tokenizer=str(tmp_path / "t.json"))
    assert open_data(data, wanted, 320).tokenizer.vocab_size <= 270


def test_ids_of_a_small_vocabulary_are_no_bytes(tmp_path):
    assert open_data(megatron(tmp_path, [[1, 2, 3] * 30]), TRAIN, 64).tokenizer is None
    assert open_data(megatron(tmp_path, [[1, 2, 3] * 30]), TRAIN, 257).tokenizer is not None


def test_a_path_that_is_missing(tmp_path):
    assert wrong(Data(source="megatron", path=str(tmp_path / "none"))).key == "data.path"


def test_a_larger_validation_split_is_advised_only_where_it_suffices(tmp_path):
    data = megatron(tmp_path, [[1] * 100], valid_fraction=0.01)
    found = wrong(data, Train(seq_len=16, eval_every=1))
    assert found.suggestions == ("data.valid_fraction=0.2", "train.eval_every=0")
    enough = replace(data, valid_fraction=0.2)
    assert open_data(enough, Train(seq_len=16, eval_every=1), 320).valid
    assert wrong(data, Train(seq_len=60, eval_every=1)).suggestions == ("train.eval_every=0",)
