"""A prepared folder, from `data.path` to the batches of a training."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from nanoscale.cli.main import run as nanoscale
from nanoscale.common.devices import Devices
from nanoscale.common.errors import UserError
from nanoscale.config.composing.compose import compose
from nanoscale.config.rules import check
from nanoscale.config.schema import Config
from nanoscale.data import open_data
from nanoscale.data.tokens.tokenizer import find, train_bpe
from tests.data.texts import as_bytes, is_held_out, prepared, texts, write_datatrove, write_jsonl

DOCUMENTS = texts(100)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("prepared")
    train_bpe(DOCUMENTS, 300, place / "tokenizer.json")
    prepared(place / "out", write_jsonl(place / "a.jsonl", DOCUMENTS), validation=0.3,
             tokenizer=str(place))  # fmt: skip
    return place / "out"


def checked(*words: str) -> Config:
    return check(compose(["recipe=debug", *words]), Devices("cpu", 1))


def test_the_folder_says_tokens_validation_and_tokenizer(folder):
    config = checked("data=megatron", f"data.path={folder}", "train.eval_every=5")
    assert config.data.path == str(folder / "tokens")
    assert config.data.valid_path == str(folder / "valid")
    assert config.data.tokenizer == str(folder / "tokenizer.json")
    assert config.data.valid_fraction == 0
    opened = open_data(config.data, config.train, config.model.vocab)
    seen = opened.train.batch(range(len(opened.train))).inputs.reshape(-1)
    kept = [text for text in DOCUMENTS if not is_held_out(text, 0.3)]
    text = opened.tokenizer.decode(seen).rstrip("�")  # a sample may end within a character
    assert len(text) > 1000
    assert "".join(kept).startswith(text)
    assert np.array_equal(
        opened.valid[0].loader.batch([0]).targets[0],
        np.fromfile(folder / "valid.bin", "<u2")[1 : config.train.seq_len + 1],
    )
    # as a frozen configuration has it
    again = checked("data=megatron", *(f"data.{key}={value}" for key, value in (
        ("path", config.data.path), ("valid_path", config.data.valid_path),
        ("tokenizer", config.data.tokenizer), ("valid_fraction", 0))), "train.eval_every=5")  # fmt: skip
    assert again.data == config.data


def test_the_validation_tokens_of_the_folder_suffice_for_evaluations(folder):
    words = ("data=megatron", f"data.path={folder}", "data.valid_fraction=0", "train.eval_every=5")
    assert checked(*words).data.valid_path == str(folder / "valid")


def test_a_model_with_fewer_tokens_is_refused_before_anything_is_written(folder, tmp_path, capsys):
    vocabulary = json.loads((folder / "manifest.json").read_bytes())["vocabulary"]
    for path in (folder, folder / "tokens"):
        words = ["recipe=debug", "data=megatron", f"data.path={path}", "model.vocab=64"]
        words += ["parallel.dp=1", "launcher.device=cpu", f"run.root={tmp_path / 'runs'}"]
        assert nanoscale(["train", *words]) == 2
        error = capsys.readouterr().err
        assert f"is less than the {vocabulary} tokens of the vocabulary that made {folder}" in error
        assert "model.vocab=320" in error
    assert not (tmp_path / "runs").exists()


def test_two_ways_to_validate_are_refused(folder):
    words = ("data=megatron", f"data.path={folder}", "data.valid_fraction=0.1")
    with pytest.raises(UserError, match="both say what to validate on"):
        checked(*words)
    with pytest.raises(UserError, match=r"data\.valid_path.*has no"):
        checked("data=megatron", f"data.path={folder}", "data.valid_path=nowhere")
    with pytest.raises(UserError, match=r"data\.valid_path"):
        checked("data.valid_path=nowhere")


def test_datatrove_files_are_trained_on(tmp_path):
    write_datatrove(tmp_path / "a.ds", as_bytes(DOCUMENTS), "H", "")
    write_datatrove(tmp_path / "b.ds", as_bytes(DOCUMENTS[:9]), "H", "")
    words = ["data=datatrove", f"data.path={tmp_path}/a.ds"]
    for more in ([], [f"data.valid_path={tmp_path}/b.ds"]):
        config = checked(*words, *more)
        opened = open_data(config.data, config.train, config.model.vocab)
        flat = [token for one in as_bytes(DOCUMENTS) for token in one]
        assert opened.train.batch([2]).inputs[0].tolist() == flat[128:192]
        assert f"{tmp_path}/a.ds" in opened.description
        assert opened.valid
        assert len(opened.valid[0].loader) > 0
    with pytest.raises(UserError, match=r"has no .*none\.ds and .*none\.ds\.index"):
        checked("data=datatrove", f"data.path={tmp_path}/none.ds")


def test_a_tokenizer_of_the_hubs_cache_is_found_by_its_name(folder, tmp_path, monkeypatch):
    """The cache's layout: blobs by commit, and a name for the newest."""
    model = tmp_path / "models--some--model"
    snapshot = model / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("0123")
    (snapshot / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert find("some/model", "--tokenizer") == snapshot / "tokenizer.json"
    with pytest.raises(UserError, match="--tokenizer: some/other: is not a file"):
        find("some/other", "--tokenizer")
