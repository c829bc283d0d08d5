"""No command replaces a file of the user's without `--overwrite`."""

from __future__ import annotations

import os
import shlex
import threading
from pathlib import Path

import pytest

from nanoscale.cli.common.output import require_writable, write_file
from nanoscale.cli.main import run as nanoscale
from nanoscale.common.errors import UserError
from tests.support.recipes import changed
from tests.support.runs import create_run

MINE = "# a recipe, written by hand\n"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my page").write_text(MINE)
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "recipe=debug", "--html"],
        ["plan", "recipe=debug", "--search", "--html"],
        ["plan", "recipe=debug", "--search", "--write"],
        ["runs", "report", "x", "--html"],
        ["recipes", "copy", "tiny"],
    ],
)
def test_a_file_that_exists_is_refused(words, capsys):
    from nanoscale.config.composing.frozen import dump

    create_run(Path("runs"), "x").config.write_text(dump(changed().config))
    Path("my page.yaml").write_text(MINE)
    assert nanoscale([*words, "my page.yaml"]) == 2
    said = capsys.readouterr().err
    assert "already exists" in said
    assert "--overwrite or " in said or words[0] == "recipes"
    assert Path("my page.yaml").read_text() == MINE


def test_what_is_proposed_is_accepted(capsys):
    for _ in range(2):
        assert nanoscale(["plan", "recipe=debug", "--html", "my page"]) == 2
        overwrite, other = capsys.readouterr().err.partition("type instead: ")[2].split(" or ")
        assert nanoscale(["plan", "recipe=debug", *shlex.split(other)]) == 0
    assert sorted(path.name for path in Path().iterdir()) == ["my page", "my page-2", "my page-3"]
    assert nanoscale(["plan", "recipe=debug", "--html", "my page", overwrite]) == 0
    assert Path("my page").read_text("utf-8").startswith("<!doctype html>")


def test_a_recipe_and_a_page_are_two_files(capsys):
    words = ["plan", "recipe=debug", "--search", "--write", "new", "--html", "./new"]
    assert nanoscale(words) == 2
    assert not Path("new").exists()


def test_a_file_that_has_come_meanwhile_is_kept():
    require_writable("--html", Path("new"), overwrite=False)
    Path("new").write_text(MINE)
    with pytest.raises(UserError, match="already exists"):
        write_file("--html", Path("new"), "page", overwrite=False)
    assert Path("new").read_text() == MINE


def test_links_stay_links_and_pipes_pipes():
    Path("link").symlink_to("my page")
    write_file("--html", Path("link"), "page", overwrite=True)
    assert Path("link").is_symlink() and Path("my page").read_text() == "page"
    os.mkfifo("pipe")
    read = []
    reader = threading.Thread(target=lambda: read.append(Path("pipe").read_text()))
    reader.start()
    write_file("--html", Path("pipe"), "page", overwrite=False)
    reader.join(60)
    assert read == ["page"] and Path("pipe").is_fifo()
