"""The help texts of options and arguments: one line, a verb first, no full stop."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import typer

from nanoscale.cli.main import VERBS, build

FIRST_WORDS = {
    "Resume",
    "Minimize",
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
        if parameter.name != "help":
            yield f"{name} {parameter.name}", parameter.help or ""
    for word, inner in getattr(command, "commands", {}).items():
        yield from parameters(inner, f"{name} {word}")


HELP = dict(parameters(typer.main.get_command(build([])), "nanoscale"))


def test_all_verbs_are_looked_at() -> None:
    assert {name.split()[1] for name in HELP} >= {*VERBS}


@pytest.mark.parametrize("name", HELP)
def test_a_help_text_is_one_line_that_starts_with_a_verb(name: str) -> None:
    text = HELP[name]
    assert text.split(" ")[0] in FIRST_WORDS
    assert len(text) <= 80
    assert "\n" not in text
    assert not text.endswith(".")
