"""`nanoscale recipes`, run in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from nanoscale.cli.main import run as nanoscale
from nanoscale.config.composing.compose import compose
from tests.support import hf_families
from tests.support.hf_families import COMMON, FAMILIES
from tests.support.rows import exhaustive


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_ls_shows_ours_and_the_users(capsys):
    Path("recipes").mkdir()
    Path("recipes/tiny.yaml").write_text("# My own tiny one.\ntrain: {steps: 3}\n")
    assert nanoscale(["recipes", "ls", "--json"]) == 0
    recipes = {each["name"]: each for each in json.loads(capsys.readouterr().out)}
    assert recipes["tiny"] == {"name": "tiny", "about": "My own tiny one", "origin": "recipes"}
    assert recipes["llama-8b"]["origin"] == "nanoscale"
    assert recipes["llama-8b"]["about"].startswith("Llama 3.1 8B")
    assert nanoscale(["recipes", "ls"]) == 0
    assert "My own tiny one (recipes)" in capsys.readouterr().out


def test_show(capsys):
    assert nanoscale(["recipes", "show", "debug"]) == 0
    text = capsys.readouterr().out
    assert "override /model: debug" in text and "# " in text
    assert nanoscale(["recipes", "show", "debug", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["content"]["train"]["steps"] == 20
    assert nanoscale(["recipes", "show", "debgu"]) == 2
    assert "debug" in capsys.readouterr().err


def test_a_copy_is_a_recipe_of_ones_own(capsys):
    assert nanoscale(["recipes", "copy", "debug"]) == 0
    assert "recipe=./recipes/debug.yaml" in capsys.readouterr().out
    assert compose(["recipe=debug"]).source("train.steps").startswith("recipes/debug.yaml:")
    assert nanoscale(["recipes", "copy", "debug", "sub/mine.yaml"]) == 0
    assert compose(["recipe=sub/mine.yaml"]).config == compose(["recipe=debug"]).config


def test_a_copy_overwrites_nothing(capsys):
    Path("recipes").mkdir()
    Path("recipes/debug.yaml").write_text("mine")
    assert nanoscale(["recipes", "copy", "debug"]) == 2
    assert "not overwritten" in capsys.readouterr().err
    assert Path("recipes/debug.yaml").read_text() == "mine"


def test_a_copy_that_cannot_be_written(capsys):
    Path("file").touch()
    assert nanoscale(["recipes", "copy", "debug", "file/mine.yaml"]) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "finetune",
        "chat-lora",
        *(exhaustive(name) for name in ("lora", "chat")),
    ],
)
def test_recipes_for_fine_tuning_plan_and_train(name, capsys, monkeypatch):
    """On a folder of transformers, with the data that the head of the recipe describes."""
    settings = COMMON | {"vocab_size": 300, "max_position_embeddings": 64}
    monkeypatch.setitem(FAMILIES, "llama", ("Llama", settings))
    hf_families.save("llama", Path("model"))
    turns = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    Path("a.jsonl").write_text(
        f"{json.dumps({'messages': turns, 'text': 'To be, or not.' * 9})}\n" * 40
    )
    chat = ["--chat"] if "chat" in name else []
    prepare = ["data", "prepare", "a.jsonl", *chat, "--tokenizer", "byte", "--out", "tokens"]
    assert nanoscale(prepare) == 0
    words = [f"recipe={name}", "model.init_from=./model", "data.path=tokens", "train.seq_len=64"]
    capsys.readouterr()
    assert nanoscale(["plan", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"]
    few = ["train.steps=2", "train.global_batch=4", "train.log_every=1", "scheduler.warmup_steps=1"]
    assert (
        nanoscale(["train", *words, *few, "launcher.device=cpu", "parallel.dp=1", "run.name=r"])
        == 0
    )
    lines = Path("runs/r/metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert len(losses) == 2 and all(0 < loss < 10 for loss in losses)
    adapters = yaml.safe_load(Path("runs/r/config.yaml").read_text())["lora"]["rank"]
    assert (adapters > 0) == ("lora" in name)
