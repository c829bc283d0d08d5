"""`nanoscale recipes`, run in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nanoscale.cli.main import run as nanoscale
from nanoscale.config.composing.compose import compose


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
