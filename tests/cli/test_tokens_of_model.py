"""A pretrained model is trained on the tokens of its own tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nanoscale.cli.main import run as nanoscale
from nanoscale.data.tokens.tokenizer import train_bpe
from tests.support import hf_families
from tests.support.hf_families import COMMON, FAMILIES

TEXTS = ("To be, or not to be, that is the question. ", "La vie est belle, et la mer est loin. ")


@pytest.fixture(autouse=True)
def _model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = COMMON | {"vocab_size": 300, "max_position_embeddings": 64}
    monkeypatch.setitem(FAMILIES, "llama", ("Llama", settings))
    hf_families.save("llama", Path("model"))
    Path("other").mkdir()
    for folder, text in zip(("model", "other"), TEXTS, strict=True):
        train_bpe([text * 20] * 9, 280, Path(folder, "tokenizer.json"))
    Path("a.jsonl").write_text(f"{json.dumps({'text': TEXTS[0] * 9})}\n" * 40)


def prepared(tokenizer, capsys):
    words = ["data", "prepare", "a.jsonl", "--tokenizer", tokenizer, "--out", "tokens", "--json"]
    assert nanoscale(words) == 0
    capsys.readouterr()


def training(capsys, *words):
    line = ["recipe=finetune", "model.init_from=./model", "data.path=tokens", "train.seq_len=64"]
    code = nanoscale(["train", *line, "launcher.device=cpu", "parallel.dp=1", "--dry-run", *words])
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("tokenizer", "made"), [("byte", "holds bytes"), ("other", "holds tokens of")]
)
def test_tokens_of_another_tokenizer_are_refused(tokenizer, made, capsys):
    prepared(tokenizer, capsys)
    code, said = training(capsys)
    assert code == 2
    assert made in said and f"--tokenizer {Path('model').absolute()}" in said


def test_tokens_of_its_own_tokenizer_are_trained(capsys):
    prepared("./model", capsys)
    assert training(capsys)[0] == 0
    own = Path("model/tokenizer.json")  # the same texts, written in another form
    own.write_text(json.dumps(json.loads(own.read_text()) | {"normalizer": None}, indent=4))
    assert training(capsys)[0] == 0
    own.unlink()
    assert training(capsys)[0] == 0


def test_what_was_prepared_is_trained_with_the_words_that_are_printed(capsys):
    assert nanoscale(["data", "prepare", "a.jsonl", "--tokenizer", "byte", "--out", "tokens"]) == 0
    line = capsys.readouterr().out.partition("nanoscale train recipe=… ")[2].split()
    assert "model.vocab=320" in line
    job = ["recipe=debug", "train.seq_len=32", "launcher.device=cpu", "parallel.dp=1"]
    assert nanoscale(["train", *job, *line, "--dry-run"]) == 0
