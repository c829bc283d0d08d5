"""The help texts of options and arguments: one line, a verb first, no full stop."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from nanoscale.cli.common.examples import LINES, examples
from nanoscale.cli.inspect.help import TOPICS
from nanoscale.cli.main import VERBS, build, run
from nanoscale.config.composing.library import Library
from nanoscale.config.composing.overrides import read_words
from tests.cli import Capsys

FIRST_WORDS = {
    "Add", "Grow", "Measure", "Remove", "Resume",
    "Optimize",
    "Stop",
    "Keep",
    "Choose", "Compare", "Compute", "Continue", "Copy", "Decode", "Divide", "Draw", "End", "Find", "Give",
    "Hold", "Launch", "Learn", "Leave", "Limit", "List", "Make", "Name", "Play", "Predict", "Prefer",
    "Print", "Rank", "Read", "Refuse", "Rehearse", "Replace", "Run", "Set", "Show", "Skip", "Split",
    "Start", "Take", "Time", "Train", "Use", "Wait", "Write",
}  # fmt: skip
"""Verbs that help texts start with; add one that is missing."""


def parameters(command, name: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the help text of each option and argument, sub-commands included."""
    for parameter in command.params:
        if parameter.name not in ("help", "install_completion", "show_completion"):
            yield f"{name} {parameter.name}", parameter.help or ""
    for word, inner in getattr(command, "commands", {}).items():
        yield from parameters(inner, f"{name} {word}")


def commands(command, name: str) -> Iterator[tuple[str, typer.core.TyperCommand]]:
    """Yield every command that is not a group, by its words."""
    inner = getattr(command, "commands", None)
    if inner is None:
        yield name, command
    for word, each in (inner or {}).items():
        yield from commands(each, f"{name} {word}".strip())


HELP = dict(parameters(typer.main.get_command(build([])), "nanoscale"))


def test_commands_answer_in_json_too() -> None:
    """Except the words that AGENTS.md names."""
    app = typer.main.get_command(build([]))
    without = {
        name
        for name, command in commands(app, "")
        if not any("--json" in getattr(it, "opts", ()) for it in command.params)
    }
    assert without == {"help", "runs stop", "runs logs", "recipes copy"}
    page = (Path(__file__).parents[2] / "AGENTS.md").read_text()
    assert all(f"`{name}`" in page for name in without)


def test_all_verbs_are_looked_at() -> None:
    assert {name.split()[1] for name in HELP} >= {*VERBS}


@pytest.mark.parametrize("name", HELP)
def test_a_help_text_is_one_line_that_starts_with_a_verb(name: str) -> None:
    text = HELP[name]
    assert text.split(" ")[0] in FIRST_WORDS
    assert len(text) <= 80
    assert "\n" not in text
    assert not text.endswith(".")


COMMANDS = dict(commands(typer.main.get_command(build([])), ""))


def test_every_command_has_examples_and_no_other_has() -> None:
    assert all(examples(command) for command in COMMANDS)
    assert sorted(LINES) == sorted(line for command in COMMANDS for line in examples(command))


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_stand_under_the_help_and_are_accepted(name: str, capsys: Capsys) -> None:
    assert run([*name.split(), "-h"]) == 0
    shown = capsys.readouterr().out.splitlines()
    for line in examples(name):
        assert f"    {line}" in shown
        assert len(line) <= 80
        words = shlex.split(line)[1:]
        assert " ".join(words[: len(name.split())]) == name
        context = COMMANDS[name].make_context(name, words[len(name.split()) :])
        overrides = context.params.get("overrides")
        if overrides and name not in ("sweep", "submit"):
            assert not read_words(overrides, Library()).violations


def test_options_of_eval_and_generate_are_in_groups(capsys: Capsys) -> None:
    groups = {
        "eval": ["Arguments", "Hosts", "Model", "Loss", "Tasks", "Options"],
        "generate": ["Arguments", "Prompts", "Sampling", "Model", "Options"],
    }
    for command, expected in groups.items():
        assert run([command, "-h"]) == 0
        lines = capsys.readouterr().out.splitlines()
        headings = [line[:-1] for line in lines if re.fullmatch(r"\w+:", line)]
        assert headings == [*expected]


def test_short_and_long_help_are_equal(capsys: Capsys) -> None:
    for command in ("", "train", "runs", "runs show"):
        assert run([*command.split(), "-h"]) == 0
        short = capsys.readouterr().out
        assert run([*command.split(), "--help"]) == 0
        assert capsys.readouterr().out == short


@pytest.mark.parametrize("topic", TOPICS)
def test_topics_fit_a_terminal(topic: str, capsys: Capsys) -> None:
    assert run(["help", topic]) == 0
    assert capsys.readouterr().out == TOPICS[topic] + "\n"
    assert all(len(line) <= 80 for line in TOPICS[topic].splitlines())


def test_help_of_a_command_and_of_nothing(capsys: Capsys) -> None:
    assert run(["plan", "--help"]) == 0
    expected = capsys.readouterr().out
    assert run(["help", "plan"]) == 0
    assert capsys.readouterr().out == expected
    assert run(["help"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"nanoscale help {topic}" for topic in TOPICS]


def test_an_unknown_topic_is_refused_and_the_advice_works(capsys: Capsys) -> None:
    assert run(["help", "layuots"]) == 2
    error = capsys.readouterr().err
    assert "unknown topic" in error
    advice = error.partition("type instead: ")[2].strip()
    assert run(shlex.split(advice)[1:]) == 0
