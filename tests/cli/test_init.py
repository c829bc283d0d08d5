"""`nanoscale init`: what it writes is planned, and the commands that it shows are typed."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from nanoscale.cli.main import run as nanoscale
from nanoscale.data.tokens.tokenizer import train_bpe
from tests.cli import Capsys
from tests.support import hf_families
from tests.support.hf_families import COMMON, FAMILIES

CHAT = {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def texts() -> None:
    Path("texts").mkdir()
    Path("texts/a.txt").write_text("To be, or not to be, that is the question. " * 400)


def commands_of(*words: str, capsys: Capsys) -> list[str]:
    assert nanoscale(["init", *words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    recipe = Path(document["recipe"]).read_text()
    assert all(f"#   {line}\n" in recipe for line in document["commands"])
    return document["commands"]


def type_until_dry_run(lines: list[str], capsys: Capsys) -> str:
    """Type the shown commands up to the dry run; return its output."""
    for line in lines:
        assert nanoscale(shlex.split(line)[1:]) == 0, capsys.readouterr().err
        if line.endswith("--dry-run"):
            return capsys.readouterr().out
    raise AssertionError("no dry run was shown")


def test_a_first_training_needs_no_data(capsys):
    lines = commands_of(capsys=capsys)
    assert "nothing was written or started" in type_until_dry_run(lines, capsys)
    assert lines[1] == "nanoscale train recipe=./pretrain.yaml run.name=pretrain"
    assert sorted(path.name for path in Path().iterdir()) == ["pretrain.yaml"]


def test_texts_are_prepared_for_a_new_model(capsys):
    texts()
    lines = commands_of("sub dir", "--data", "texts", "--name", "mine", capsys=capsys)
    assert len(lines) == 4 and lines[0].startswith("nanoscale data prepare ")
    assert " epoch" in type_until_dry_run(lines, capsys)
    # the prepared folder is data, too
    again = commands_of("--data", "sub dir/mine-tokens", capsys=capsys)
    assert len(again) == 3
    type_until_dry_run(again, capsys)


@pytest.mark.parametrize("model", ["debug", "gpt2"])
def test_models_of_the_group(model, capsys):
    lines = commands_of("--model", model, capsys=capsys)
    type_until_dry_run([f"{lines[0].removesuffix(' --dry-run')} --force --dry-run"], capsys)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["finetune", "chat-lora", "distill"])
def test_a_pretrained_model_is_fine_tuned(task, capsys, monkeypatch):
    settings = COMMON | {"vocab_size": 300, "max_position_embeddings": 64}
    monkeypatch.setitem(FAMILIES, "llama", ("Llama", settings))
    hf_families.save("llama", Path("model"))
    texts()
    train_bpe([Path("texts/a.txt").read_text()], 300, Path("model/tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    Path("model/tokenizer_config.json").write_text(json.dumps(about | {"chat_template": TEMPLATE}))
    Path("chats.jsonl").write_text(f"{json.dumps(CHAT)}\n" * 40)
    capsys.readouterr()  # what imports said
    data = "chats.jsonl" if "chat" in task else "texts"
    words = ["--task", task, "--model", "./model", "--data", data]
    words += ["--teacher", "./model"] if task == "distill" else []
    if task == "distill":
        assert nanoscale(["init", *words[:6]]) == 2  # nobody can be asked for the teacher
    lines = commands_of(*words, capsys=capsys)
    assert len(lines) == (3 if "chat" in task else 4)  # a file needs no preparation
    out = type_until_dry_run(lines, capsys)
    assert ("adapters" in out) == ("lora" in task)
    assert " epochs" in out


def test_a_name_at_hugging_face(capsys):
    """A name without a slash, too."""
    texts()
    for name in ("gpt2", "Qwen/Qwen3-0.6B"):
        words = [
            "--task",
            "chat-lora",
            "--model",
            name,
            "--data",
            "texts",
            "--name",
            f"{len(name)}",
        ]
        assert f"--tokenizer {name} --chat" in commands_of(*words, capsys=capsys)[0]
        assert f'\n  init_from: "{name}" # a folder' in Path(f"{len(name)}.yaml").read_text()


@pytest.mark.parametrize(
    "words",
    [
        ["--task", "lora", "--data", "texts"],
        ["--task", "lora", "--data", "texts", "--model", "list"],
        ["--task", "lora", "--data", "texts", "--model", "list/of"],
        ["--task", "lora", "--model", "."],
        ["--task", "chat", "--model", "./nowhere", "--data", "texts"],
        ["--model", "tinny"],
        ["--data", "nothing"],
        ["--name", "../x"],
        ["--name", ""],
        ["--task", "train"],
        ["--task", "distill", "--model", "gpt2", "--data", "texts", "--teacher", "./nowhere"],
        ["--teacher", "gpt2"],
        ["texts/a.txt"],
    ],
)
def test_bad_answers_write_nothing(words, capsys):
    texts()
    Path("list").mkdir()
    Path("list/config.json").write_text("[]")
    before = sorted(Path().rglob("*"))
    assert nanoscale(["init", *words]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert sorted(Path().rglob("*")) == before


def test_nothing_is_overwritten_and_the_advice_works(capsys):
    Path("pretrain.yaml").write_text("mine")
    assert nanoscale(["init"]) == 2
    advice = capsys.readouterr().err.partition("type instead: ")[2].strip()
    assert Path("pretrain.yaml").read_text() == "mine"
    assert nanoscale(["init", *shlex.split(advice)]) == 0
    assert Path("pretrain-2.yaml").exists()
    assert nanoscale(["init", "--model", "tinny"]) == 2
    capsys.readouterr()
    assert nanoscale(["init", "--model", "tiny", "--name", "third"]) == 0


def test_a_person_at_a_terminal_is_asked(capsys, monkeypatch):
    answers = iter(["wrong", "pretrain", "debugg", "debug", "/nope", "stdlib", "mine"])
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr("typer._click.termui.visible_prompt_func", lambda _: next(answers))
    assert nanoscale(["init"]) == 0
    assert "override /model: debug" in Path("mine.yaml").read_text()
    asked = capsys.readouterr().err
    assert "type one of pretrain, finetune, lora, chat, chat-lora" in asked
    assert "--data /nope: does not exist" in asked or "data=/nope: does not exist" in asked, asked
