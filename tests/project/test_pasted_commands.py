"""Commands that nanoscale shows work when they are pasted, whatever the names of folders and runs."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest

import nanoscale
from nanoscale.common.errors import UserError
from nanoscale.config.violations import override
from nanoscale.data.prepare.folder import _check_request
from nanoscale.launch.batch.jobs import way_on
from nanoscale.runs import lock
from nanoscale.runs.directory import check_free, check_name
from nanoscale.runs.lock import RunLock
from tests.support.recipes import changed
from tests.support.runs import create_run

NAME = "corpus v2; touch x $(touch y) 'z"

_COMMAND = re.compile(
    r"(^|[\s`:(])(nanoscale (train|resume|submit|plan|doctor|data|generate|eval|bench|runs|checkpoints|recipes)"
    r"|rm -|mv -|ssh |touch |mkdir |sbatch |scancel |pip install )[^`\n]*$"
)
_QUOTES = ("shlex.quote(", "shlex.join(", "override(", "_override(")
_PLAIN = ("key", "begun", "2 * steps", "prompt")
"""Names of keys, a text without values, a number, one of two quoted texts."""


def test_no_command_is_shown_with_a_raw_value():
    for path in Path(nanoscale.__file__).parent.rglob("*.py"):
        for text in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(text, ast.JoinedStr):
                raw = [value for value in raw_values(text) if value not in _PLAIN]
                assert all(value.startswith(_QUOTES) for value in raw), (
                    f"{path}:{text.lineno} {raw}"
                )


def raw_values(text):
    """Yield the values put into the part of a text that is a command."""
    said = ""
    for part in text.values:
        if isinstance(part, ast.Constant):
            said += part.value
        else:
            if _COMMAND.search(said.rpartition("\n")[2]):
                yield ast.unparse(part.value)
            said += "…"


@pytest.mark.parametrize(
    "value", ["plain/path-1.yaml", "a b", NAME, 'a"b', "a\\", "it's", "$HOME", "a=b,c", "", "[x]"]
)
def test_an_override_is_one_word_that_sets_the_value(value):
    (word,) = shlex.split(override("data.tokenizer", value))
    assert changed(word).config.data.tokenizer == value
    (word,) = shlex.split(override("launcher.pass_env", [value, "b"]))
    assert changed(word).config.launcher.pass_env == [value, "b"]


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return create_run(tmp_path / "runs", NAME)


def test_commands_about_a_run_name_it(run, tmp_path):
    assert shlex.split(way_on(run)) == ["nanoscale", "resume", NAME]
    with RunLock(run), pytest.raises(UserError) as error:
        lock.refuse_if_held(run)
    follow, stop = map(shlex.split, error.value.violations[0].suggestions)
    assert follow == ["nanoscale", "runs", "logs", NAME, "--follow"]
    assert stop == ["nanoscale", "runs", "stop", NAME]
    run.config.touch()
    with pytest.raises(UserError) as error:
        check_free(tmp_path / "runs", NAME)
    name, resume = error.value.violations[0].suggestions
    (word,) = shlex.split(name)
    assert changed(word).config.run.name == f"{NAME}-2"
    assert shlex.split(resume) == ["nanoscale", "resume", str(run.path)]
    run.lock.unlink()
    with pytest.raises(UserError) as error, RunLock(run):
        pass
    assert shlex.split(error.value.violations[0].suggestions[0]) == ["touch", str(run.lock)]


def test_a_legal_name_is_proposed_as_one_word():
    with pytest.raises(UserError) as error:
        check_name(f"/{NAME}")
    (word,) = shlex.split(error.value.violations[0].suggestions[0])
    assert changed(word).config.run.name == f"-{NAME}".lstrip("-")


def test_the_folder_that_is_to_be_removed_is_one_word(tmp_path):
    """`rm -r /x/corpus v2.part` deletes `/x/corpus`."""
    part = tmp_path / "corpus v2.part"
    part.mkdir()
    _check_request(part, {"workers": 1})
    with pytest.raises(UserError) as error:
        _check_request(part, {"workers": 2})
    command = error.value.violations[0].remedy.partition("again: ")[2]
    assert shlex.split(command) == ["rm", "-r", "--", str(part)]
