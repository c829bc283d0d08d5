"""Completion of what a shell asks for: overrides, recipes, keys, groups, runs.

Typer reads and answers the questions of bash, zsh and fish; this file names the candidates. It imports neither
torch nor Hydra. With a single candidate the shell adds a space, so a candidate that is not a complete word is
replaced by its continuations.
"""

import os
import re
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

from nanoscale.config.composing.library import Library
from nanoscale.config.reference import alternatives, declared, meaning, sections
from nanoscale.config.violations import shown

VARIABLE = "_NANOSCALE_COMPLETE"
"""The environment variable by which a shell asks."""
Candidates = list[tuple[str, str]]
"""Texts that continue the incomplete word, and what each is."""
_BREAK = re.compile("[=:]+")


def previous_words() -> list[str]:
    """Return the complete words before the cursor of the asking shell, without the program."""
    if "COMP_CWORD" in os.environ:
        return os.environ["COMP_WORDS"].split("\n")[1 : int(os.environ["COMP_CWORD"])]
    line = os.environ.get("_TYPER_COMPLETE_ARGS", "")
    words = line.split()[1:]
    return words if line.endswith(" ") else words[:-1]


def overrides(incomplete: str) -> Candidates:
    """Complete GROUP=OPTION and KEY=VALUE."""
    word, kept = _current_word(incomplete)
    candidates = _overrides(word)
    while len(candidates) == 1:  # a candidate that is not complete is replaced by its continuations
        (only,) = candidates
        further = _overrides(only) if only[-1] in "=." else {}
        if not further or further.keys() == candidates.keys():
            break
        candidates = further if len(further) > 1 else candidates | further
    starting = _starting(candidates, kept)
    return [(text.removeprefix(kept), about) for text, about in starting.items()]


def recipes(incomplete: str) -> Candidates:
    return list(_starting(_options("recipe"), incomplete).items())


def keys(incomplete: str) -> Candidates:
    """Complete the name of a section, and after its dot the name of a key."""
    known = _keys() if "." in incomplete else _sections()
    return list(_starting(known, incomplete).items())


def groups(incomplete: str) -> Candidates:
    """Complete the name of a group or of a section."""
    known = dict.fromkeys(Library.groups(), "group") | _sections()
    return list(_starting(known, incomplete).items())


def runs(incomplete: str) -> Candidates:
    """Complete the name of a run in runs/."""
    from nanoscale.runs.directory import RunDirectory

    return [(run.name, "") for run in RunDirectory.all() if run.name.startswith(incomplete)]


def _current_word(incomplete: str) -> tuple[str, str]:
    """Return the word at the cursor, and its beginning that stays: bash splits words at `=` and `:`."""
    if "COMP_CWORD" not in os.environ:
        return incomplete, ""
    words = os.environ["COMP_WORDS"].split("\n")[: int(os.environ["COMP_CWORD"]) + 1]
    parts = [words.pop()]
    while parts[0] and words and (_BREAK.fullmatch(words[-1]) or _BREAK.fullmatch(parts[0])):
        parts.insert(0, words.pop())
    word = "".join(parts)
    return word, word if _BREAK.fullmatch(parts[-1]) else "".join(parts[:-1])


def _overrides(word: str) -> dict[str, str]:
    """Return the overrides that continue a word, and what each is."""
    name, equals, _ = word.partition("=")
    if equals:
        values = _options(name) if name in Library.groups() else _values(name)
        known = {f"{name}={value}": about for value, about in values.items()}
    elif "." in word:
        known = {f"{key}=": about for key, about in _keys().items()}
    else:
        known = {f"{group}=": "group" for group in Library.groups()}
        known |= {f"{section}.": about for section, about in _sections().items()}
    return _starting(known, word)


def _keys() -> dict[str, str]:
    return {name: key.meaning for name, key in declared().items()}


def _sections() -> dict[str, str]:
    return {name: meaning(name) for name in sections() if name and "." not in name}


def _options(group: str) -> dict[str, str]:
    return {name: option.about for name, option in Library().options(group).items()}


def _values(name: str) -> dict[str, str]:
    """Return the values of a key that are words; a file's name is left to the shell."""
    key = declared().get(name)
    if key is None or key.path or key.takes_mapping:
        return {}
    values = {word: "" for choice in alternatives(key.annotation) for word in _words(choice)}
    return values | {shown(key.default): "default"}


def _words(choice: Any) -> tuple[str, ...]:
    """Return the words of one alternative of a key's type; none for numbers and free texts."""
    if get_origin(choice) is Literal:
        return tuple(map(str, get_args(choice)))
    return {bool: ("true", "false"), type(None): ("null",)}.get(choice, ())


def _starting(candidates: Mapping[str, str], word: str) -> dict[str, str]:
    return {text: about for text, about in candidates.items() if text.startswith(word)}
