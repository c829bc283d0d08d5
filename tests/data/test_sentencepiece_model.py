"""Sentencepiece models, trained here by sentencepiece itself: the same ids, in data, training and exports."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanoscale.cli.main import run as nanoscale
from nanoscale.common.errors import UserError
from nanoscale.data import corpus
from nanoscale.data.tokens.tokenizer import find, load
from tests.data.texts import write_jsonl

sentencepiece = pytest.importorskip("sentencepiece")

ROOT = Path(__file__).parents[2]
LEARNT = [line for line in (ROOT / "docs/data.md").read_text().splitlines() if line.strip()]
OTHERS = [
    (ROOT / "docs/planner.md").read_text(),
    (ROOT / "nanoscale/data/tokens/tokenizer.py").read_text(),
    "  in  the \t middle\n\n and at the end ",
    "<s> and </s> written in a text <unk>",
    "Zürich, 東京 and Ελλάδα: 🙂 ﬁ ½ \u00a0 e\u0301",
    "x",
    "",
]
"""Texts that the models have not learnt."""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NANOSCALE_CACHE", str(tmp_path / "cache"))


def trained(folder: Path, vocab: int = 400, **options: Any) -> Any:
    """Train folder/tokenizer.model, and return it as sentencepiece reads it."""
    folder.mkdir(exist_ok=True)
    options = {"character_coverage": 1.0, "required_chars": "<>/|_", **options}
    with (folder / "tokenizer.model").open("wb") as stream:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(LEARNT),
            model_writer=stream,
            vocab_size=vocab,
            minloglevel=2,
            **options,
        )
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


def assert_equal(own: Any, ids: list[int], expected: list[int]) -> None:
    """Two divisions of a text may have equal scores: libraries choose between them by rounding."""
    scores = [sum(map(own.get_score, each)) for each in (ids, expected)]
    assert ids == expected or scores[0] == pytest.approx(scores[1], rel=1e-6)
    assert own.decode(ids) == own.decode(expected)


SYMBOLS = {"user_defined_symbols": ["<|im_start|>", "<sep>"], "control_symbols": ["<pad>"]}


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"byte_fallback": True, "vocab": 600},
        {"normalization_rule_name": "identity", "remove_extra_whitespaces": False},
        {"normalization_rule_name": "nfkc_cf", "add_dummy_prefix": False, "split_digits": True},
        {**SYMBOLS, "pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3, "pad_piece": "<fill>"},
    ],
    ids=["defaults", "bytes", "identity", "nfkc_cf", "symbols"],
)
def test_ids_and_texts_are_those_of_sentencepiece(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    own = trained(tmp_path / "m", model_type=kind, **options)
    tokenizer = load(tmp_path / "m/tokenizer.model")
    assert (tokenizer.vocab_size, tokenizer.eos, tokenizer.bos) == (
        len(own),
        own.eos_id(),
        own.bos_id(),
    )
    symbols = ["a <sep> b<|im_start|>c<sep><sep>", "<sep>x"]
    for text in [*LEARNT, *OTHERS, *(symbols if "control_symbols" in options else [])]:
        ids = own.encode(text)
        assert_equal(own, tokenizer.encode(text), ids)
        if own.unk_id() not in ids:  # sentencepiece writes it as ⁇
            assert tokenizer.decode(ids) == own.decode(ids)
    whole = [[*tokenizer.encode(text), own.eos_id()] for text in LEARNT]
    assert [ids.tolist() for ids in tokenizer.encode_documents(LEARNT)] == whole


def test_a_folder_and_the_files_beside(tmp_path: Path) -> None:
    trained(tmp_path / "m")
    (tmp_path / "m/tokenizer_config.json").write_text('{"eos_token": "<s>", "chat_template": "x"}')
    file = find("m", "--tokenizer")
    assert file == find("m/tokenizer.model", "--tokenizer") and file.is_relative_to(
        tmp_path / "cache"
    )
    settings = json.loads(file.with_name("tokenizer_config.json").read_text())
    assert (settings["eos_token"], settings["bos_token"], settings["chat_template"]) == (
        "<s>",
        "<s>",
        "x",
    )
    assert load(file).eos == 1
    (tmp_path / "m/tokenizer_config.json").unlink()
    assert load(tmp_path / "m/tokenizer.model").eos == 2
    shutil.copy(file, tmp_path / "m/tokenizer.json")
    assert find("m", "--tokenizer") == Path("m/tokenizer.json")
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_a_model_of_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "hub/models--some--model"
    (model / "refs").mkdir(parents=True)
    (model / "refs/main").write_text("0123")
    (model / "snapshots").mkdir()
    own = trained(model / "snapshots/0123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    found = load(find("some/model", "--tokenizer")).encode(OTHERS[0])
    assert_equal(own, found, own.encode(OTHERS[0]))


def test_models_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.model").write_bytes(b"\n\x0e\n\x05<unk>")
    with pytest.raises(UserError, match=r"a\.model: it is not a sentencepiece model"):
        find("a.model", "--tokenizer")
    trained(tmp_path / "words", model_type="word", vocab=200, hard_vocab_limit=False)
    with pytest.raises(UserError, match="neither a unigram model nor a BPE"):
        find("words", "--tokenizer")
    # its normalization joins "\r\n" in the tokenizers library
    trained(tmp_path / "spaces", remove_extra_whitespaces=False)
    with pytest.raises(UserError, match="cannot be reproduced; give the tokenizer.json"):
        find("spaces", "--tokenizer")
    trained(tmp_path / "m")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(UserError, match="needs sentencepiece: .*pip install"):
        find("m", "--tokenizer")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("failure", [OSError("no space left"), KeyboardInterrupt()])
def test_a_conversion_that_fails_leaves_nothing_in_the_cache(
    failure: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise failure

    trained(tmp_path / "m")
    (tmp_path / "m/tokenizer_config.json").write_text("{}")
    monkeypatch.setattr(shutil, "copyfile", fail)
    with pytest.raises(type(failure)):
        find("m", "--tokenizer")
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_embedded_corpus(tmp_path: Path) -> None:
    own = trained(tmp_path / "m")
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources/a.py").write_text(OTHERS[1])
    made = corpus.prepare_corpus(tmp_path / "sources", tmp_path / "cache", "m/tokenizer.model", 0)
    tokens = np.fromfile(f"{made.prefix}.bin", np.uint16)
    assert tokens.tolist() == [*own.encode(OTHERS[1]), own.eos_id()]


@pytest.mark.slow
def test_from_texts_to_an_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = trained(tmp_path / "m")
    write_jsonl(Path("a.jsonl"), LEARNT)
    prepare = ["data", "prepare", "a.jsonl", "--tokenizer", "m/tokenizer.model", "--out", "tokens"]
    assert nanoscale(prepare) == 0
    expected = [token for text in LEARNT for token in (*own.encode(text), own.eos_id())]
    assert np.fromfile("tokens/tokens.bin", np.uint16).tolist() == expected
    train = ["train", "recipe=debug", "model.vocab=400", "data=megatron", "data.path=tokens"]
    assert (
        nanoscale([*train, "parallel.dp=1", "launcher.device=cpu", "train.steps=2", "run.name=r"])
        == 0
    )
    capsys.readouterr()
    assert nanoscale(["generate", "r", "--prompt", "tokens", "--max-tokens", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)
    assert nanoscale(["checkpoints", "export", "r", "--format", "hf", "--out", "hf"]) == 0
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained("hf")
    for text in LEARNT:
        assert theirs.encode(text, add_special_tokens=False) == own.encode(text)
    assert theirs.eos_token_id == own.eos_id()
