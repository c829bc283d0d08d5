"""Files that were made to break a command: one clear error, soon, and nothing else."""

from __future__ import annotations

import io
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from nanoscale.cli.main import run as nanoscale
from nanoscale.runs.directory import RunDirectory
from nanoscale.sweep.sweep import Sweep
from tests.cli import Capsys
from tests.support.jobs import run_of_bytes

DEEP = "[" * 100_000 + "]" * 100_000
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "vocab_size": 257,
    "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.chdir(tmp_path)
    return run_of_bytes(tmp_path / "runs", name="first")


def refused(capsys: Capsys, *words: str) -> str:
    code = nanoscale(list(words))
    text = capsys.readouterr().err
    assert code == 2, text
    assert "internal error" not in text
    return text


def test_deeply_nested_json_is_an_error_of_its_file(run: RunDirectory, capsys: Capsys) -> None:
    run.status.write_text(f'{{"state": {DEEP}}}')
    assert nanoscale(["runs", "ls"]) == 0
    assert "status.json is not JSON" in capsys.readouterr().out
    (manifest,) = run.checkpoints.glob("step-*/manifest.json")
    manifest.write_text(f'{{"step": {DEEP}}}')
    assert nanoscale(["checkpoints", "ls", "first"]) == 0
    assert "damaged" in capsys.readouterr().out
    Path("model").mkdir()
    Path("model/config.json").write_text(f'{{"model_type": {DEEP}}}')
    for words in (
        ("train", "recipe=debug", "model.init_from=./model", "--dry-run"),
        ("generate", "./model", "--prompt", "x"),
        ("config", "from-deepspeed", "model/config.json"),
    ):
        assert "nested too deeply" in refused(capsys, *words)


def test_a_header_of_weights_may_be_deep_too(run: RunDirectory, capsys: Capsys) -> None:
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(LLAMA))
    header = f'{{"a": {DEEP}}}'.encode()
    Path("model/model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    text = refused(capsys, "train", "recipe=debug", "model.init_from=./model", "--dry-run")
    assert "model.safetensors" in text


def test_a_model_of_a_billion_layers_is_refused(tmp_path: Path, capsys: Capsys) -> None:
    huge = LLAMA | {"num_hidden_layers": 10**9}
    (tmp_path / "config.json").write_text(json.dumps(huge))
    (tmp_path / "model.safetensors").touch()
    text = refused(capsys, "generate", str(tmp_path), "--prompt", "x", "--tokenizer", "byte")
    assert "model.layers=1000000000" in text and "at most 10,000" in text


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            '{"train_batch_size": 8, "gradient_clipping": Infinity}',
            "gradient_clipping=inf: optimizer.clip_norm",
        ),
        ('{"train_batch_size": 8, "steps_per_print": -5}', "steps_per_print=-5: train.log_every"),
        (
            '{"train_batch_size": 8, "zero_optimization": {"stage": 9}}',
            "stage=9: zero.stage must be one of 0, 1, 2, 3",
        ),
    ],
)
def test_settings_that_no_key_can_have_are_refused(
    tmp_path: Path, capsys: Capsys, settings: str, text: str
) -> None:
    file = tmp_path / "ds.json"
    file.write_text(settings)
    out = tmp_path / "recipe.yaml"
    assert text in refused(capsys, "config", "from-deepspeed", str(file), "--out", str(out))
    assert not out.exists()


def test_a_file_without_end_is_not_read_to_it(capsys: Capsys) -> None:
    assert "1048576 bytes" in refused(capsys, "config", "from-deepspeed", "/dev/zero")


def test_a_tokenizer_that_cannot_work_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.model").touch()
    Path("a.txt").write_text("a" * 60 + "b\n")
    prepare = ("data", "prepare", "a.txt", "--out", "out", "--tokenizer")
    assert "empty.model: it cannot be converted" in refused(capsys, *prepare, "empty.model")
    slow: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [
            {"id": 2, "content": "<|endoftext|>", "single_word": False, "lstrip": False,
             "rstrip": False, "normalized": False, "special": True}
        ],
        "pre_tokenizer": {
            "type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False
        },
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "<|endoftext|>": 2}, "merges": []},
    }  # fmt: skip
    Path("slow.json").write_text(json.dumps(slow))
    assert "the tokenizer cannot encode a text" in refused(capsys, *prepare, "slow.json")


def test_half_of_a_surrogate_pair_is_not_text(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    half = '{"prompt": "\\ud800", "train_batch_size": 8}'
    Path("p.jsonl").write_text(half)
    words = ("generate", "first", "--max-tokens", "2")
    assert "surrogate pair" in refused(capsys, *words, "--prompts", "p.jsonl")
    assert "--prompt is not UTF-8" in refused(capsys, *words, "--prompt", "\udcff")
    monkeypatch.setattr("sys.stdin", io.StringIO("\udcff"))
    assert "standard input is not UTF-8" in refused(capsys, *words)
    assert "surrogate pair" in refused(capsys, "config", "from-deepspeed", "p.jsonl")
    Path("p.jsonl").write_text('{"prompt": "\\ud83d\\ude00"}')
    assert nanoscale([*words, "--prompts", "p.jsonl"]) == 0


def test_a_password_does_not_enter_a_run(tmp_path: Path, capsys: Capsys) -> None:
    words = ("train", "recipe=debug", f"run.root={tmp_path}", "logger.mlflow=on", "--dry-run")
    text = refused(capsys, *words, "logger.mlflow_uri=http://me:secret@localhost:5000")
    assert "type instead: logger.mlflow_uri=http://localhost:5000" in text
    assert "MLFLOW_TRACKING_PASSWORD" in text


@pytest.mark.slow
def test_a_damaged_study_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        "recipe=debug",
        "train.steps=2",
        "optimizer.lr=interval(1e-4,1e-3)",
        "--sampler",
        "random",
    ]
    assert nanoscale(["sweep", *words, "--trials", "1", "--name", "study"]) == 0
    storage = Sweep(Path("sweeps/study").absolute()).storage
    with pytest.raises(sqlite3.DatabaseError):
        storage.write_bytes(b"no database" * 1000)
        sqlite3.connect(storage).execute("select 1 from studies")
    capsys.readouterr()
    assert "optuna.db cannot be read" in refused(capsys, "sweep", "--resume", "study")
