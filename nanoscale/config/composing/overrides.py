"""The overrides of a command line, parsed with Hydra's own grammar and compared with the schema.

Hydra's messages for a mistyped key suggest its `+` and `++` prefixes, which bypass every check. Here an
override of an unknown name is refused with suggestions, whatever its prefix.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoscale.common.errors import Violation
from nanoscale.config import reference
from nanoscale.config.composing.library import RECIPE, Library, is_path, misplaced
from nanoscale.config.values.convert import fits, unknown_key, whole_section
from nanoscale.config.values.equivalents import equivalent
from nanoscale.config.values.provenance import COMMAND_LINE
from nanoscale.config.violations import nearest, nearest_key, quoted, shown
from nanoscale.config.violations import override as to_override

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

_PLAIN = re.compile(
    r"(?!hydra)([a-z_][a-z0-9_]*(?:\.[a-z_][a-z0-9_]*)*)="
    r"(?:(0|[1-9][0-9]*)|(?!(?i:null|true|false|inf|nan)$)([A-Za-z_/][A-Za-z0-9_/.-]*))"
)
"""An override whose value Hydra's grammar reads as an integer or a text. Hydra takes 0.1 s to import."""
FILTERS = ("launcher.include", "launcher.exclude")
"""Keys whose values contain commas, at which Hydra separates several values."""
_SEVERAL = "logger"
"""The group of which several options can be chosen."""
_FEW = 10
"""Up to this number, all options are listed, whatever is near."""


@dataclass
class Words:
    """The content of the overrides."""

    choices: dict[str, str | None] = field(default_factory=dict)
    """Group → option; null if `~group` deletes the choice."""
    settings: list[tuple[str, Any]] = field(default_factory=list)
    """Dotted key → raw value, in the order given."""
    typed: dict[str, str] = field(default_factory=dict)
    """Key or group → the text after its last `=`."""
    violations: list[Violation] = field(default_factory=list)

    def touched(self) -> frozenset[str]:
        """Return every key that the overrides decide, by name or by their group."""
        keys = reference.declared()
        prefixes = tuple(f"{group}." for group in self.choices if group != RECIPE)
        by_group = {key for key in keys if key.startswith(prefixes)} if prefixes else set()
        return frozenset(by_group | {key for key, _ in self.settings})


def read_words(words: Sequence[str], library: Library) -> Words:
    """Parse and check every override; wrong ones are left out and listed in `violations`."""
    result = Words()
    before = ""
    for word in _joined(words, library, result):
        if _continues(before, word, library):
            before = f"{before} {word}"
            key, _, text = before.partition("=")
            message = "has a blank, at which the shell divides it; it needs quotes"
            quoted_text = (to_override(key, text),)
            divided = Violation(key, text, COMMAND_LINE, message, quoted_text, typed=text)
            result.violations = [it for it in result.violations if it.key != key] + [divided]
            continue
        before = word
        if not word.partition("=")[0]:
            problem = Violation(word or "''", None, COMMAND_LINE, "is not KEY=VALUE")
            result.violations.append(problem)
            continue
        if plain := _PLAIN.fullmatch(word):
            key, number, text = plain.groups()
            result.typed[key] = number or text
            value = int(number) if number else text
            result.violations += _assign(key, value, library, result)
        elif (override := parsed(word)) is not None:
            result.typed[override.key_or_group] = word.partition("=")[2]
            result.violations += _take(override, library, result)
        else:
            result.violations.append(_unreadable(word, library))
    return result


def _joined(words: Sequence[str], library: Library, into: Words) -> Iterator[str]:
    """Yield the words, except several that stand for one override, as `train.steps = 5` and `recipe debug`."""
    at = 0
    while at < len(words):
        key, *rest = words[at : at + 3]
        known = key in library.groups() or key in reference.declared()
        value = rest[1:] if rest[:1] == ["="] else rest[:1]
        if known and value and "=" not in value[0] and not value[0].startswith("~"):
            advice = f"{key}={shlex.quote(value[0])}"
            if not read_words([advice], library).violations:
                message = "is followed by its value: write `=` between them, without blanks"
                into.violations.append(Violation(key, None, COMMAND_LINE, message, (advice,)))
                at += 3 if rest[:1] == ["="] else 2
                continue
        yield key
        at += 1


def parsed(word: str) -> Override | None:
    """Return an override as Hydra's grammar reads it; None if it cannot."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(word)
    except HydraException:
        return None


def _continues(before: str, word: str, library: Library) -> bool:
    """True if a lone word belongs to the text of the override before it, divided by the shell at a blank."""
    key, equals, text = before.partition("=")
    if not equals or not word or "=" in word or word[0] == "~" or word in reference.declared():
        return False
    if any(library.find(f"{group}/{word}") for group in library.groups()):
        return False
    text += f" {word}"
    return is_path(text) if key == RECIPE else key in reference.declared() and fits(key, text)


def with_good_advice(violation: Violation, asked: Words, library: Library) -> Violation:
    """Return the violation with its value as it was typed, without overrides that would be refused in turn."""
    typed = asked.typed.get(violation.key, "") if violation.source == COMMAND_LINE else ""
    good = (text for text in violation.suggestions if _is_accepted(text, library))
    if typed and isinstance(violation.value, float):  # 1e-4, not 0.0001
        end = f"={shown(violation.value)}"
        good = (
            f"{text.removesuffix(end)}={typed}" if text.endswith(end) else text for text in good
        )
    return replace(violation, suggestions=tuple(good), typed=violation.typed or typed)


def _is_accepted(advice: str, library: Library) -> bool:
    """True if suggested overrides are valid by themselves, and for all other advice."""
    try:
        overrides = shlex.split(advice)
    except ValueError:
        return False
    if not overrides or not all("=" in word or word.startswith("~") for word in overrides):
        return True
    tried = read_words(overrides, library)
    return not tried.violations and all(
        key not in reference.declared() or "${" in str(value) or fits(key, value)
        for key, value in tried.settings
    )


def _take(override: Override, library: Library, into: Words) -> Iterator[Violation]:
    """Add one parsed override to `into`, or yield its violations."""
    key = override.key_or_group
    text = override.input_line or key
    value = None if override.is_sweep_override() else _with_text_keys(override.value())
    if override.is_sweep_override():
        yield _sweep(override, text)
    elif key == "hydra" or override.is_hydra_override():
        message = "belongs to Hydra, whose own settings are not used"
        yield Violation(key, value, COMMAND_LINE, message)
    elif override.package is not None:
        message = "moves a group to another section, which is not supported"
        moved = f"{key}@{override.package}"
        yield Violation(moved, value, COMMAND_LINE, message, (to_override(key, value),))
    elif override.is_delete():
        yield from _delete(key, value, library, into)
    else:
        yield from _assign(key, value, library, into)


def _assign(key: str, value: object, library: Library, into: Words) -> Iterator[Violation]:
    chooses = key in library.groups() and not isinstance(value, dict)
    return (_choose if chooses else _set)(key, value, library, into)


def _with_text_keys(value: Any) -> Any:
    """Return the value with text keys of mappings, as in YAML files here."""
    if isinstance(value, dict):
        return {
            name if isinstance(name, str) else shown(name): _with_text_keys(entry)
            for name, entry in value.items()
        }
    return [_with_text_keys(entry) for entry in value] if isinstance(value, list) else value


def _choose(group: str, value: object, library: Library, into: Words) -> Iterator[Violation]:
    if value is None and group == RECIPE:
        into.choices.pop(RECIPE, None)
    elif isinstance(value, str) and library.find(f"{group}/{value}") is not None:
        into.choices[group] = value
    elif isinstance(value, list) and group == _SEVERAL and value:
        yield from _choose_several(group, value, library, into)
    elif isinstance(value, list):
        near = tuple(f"{group}={option}" for option in value if isinstance(option, str))
        yield Violation(group, value, COMMAND_LINE, "takes one option", near)
    elif group == RECIPE and isinstance(value, str) and is_path(value):
        folder, slash, name = value.rpartition("/")
        neighbors = [path.name for path in Path(folder + slash).glob("*.yaml")]
        close = [folder + slash + other for other in nearest(name, neighbors)]
        close += nearest(Path(name).stem, library.options(RECIPE))
        proposals = tuple(f"{group}={option}" for option in close[:3])
        yield Violation(group, value, COMMAND_LINE, "is a file that does not exist", proposals)
    else:
        options = library.options(group)
        near = nearest(shown(value), options)
        message = f"unknown {group}"
        if (meant := equivalent(shown(value))) is not None and "" in meant.overrides:
            yield Violation(group, value, COMMAND_LINE, message, (meant.overrides[""],))
            return
        if not near or len(options) <= _FEW:
            message += f"; there are {', '.join(options)}"
        proposals = tuple(to_override(group, option) for option in near)
        if group == "model" and not near:
            message += "; the weights of a model's folder, or of a hub's model, are model.init_from"
            proposals = (to_override("model.init_from", value),)
        yield Violation(group, value, COMMAND_LINE, message, proposals)


def _choose_several(
    group: str, options: list[Any], library: Library, into: Words
) -> Iterator[Violation]:
    """Choose several options of a group whose options add to each other, as in `logger=[csv,wandb]`."""
    unknown = [option for option in options if library.find(f"{group}/{option}") is None]
    if unknown:
        for option in unknown:
            yield from _choose(group, str(option), library, into)
        return
    into.choices[group] = "none"
    defaults = reference.defaults(reference.sections()[group])
    off = {**defaults, **library.serve(f"{group}/none").content}
    contents = [library.serve(f"{group}/{option}").content for option in options]
    # In front: a key wins over its group, wherever the two stand.
    into.settings[:0] = [
        (f"{group}.{name}", value)
        for content in contents
        for name, value in content.items()
        if value != off[name]
    ]


def _set(key: str, value: object, library: Library, into: Words) -> Iterator[Violation]:
    if (mapping := reference.mapping_around(key)) is not None:
        if problem := misplaced(mapping, {key: value}):
            yield Violation(key, value, COMMAND_LINE, problem)
        else:
            into.settings.append((key, value))
    elif key not in reference.declared() and key not in reference.sections():
        yield _unknown(key, value, library)
    elif isinstance(value, dict) and key in reference.sections():
        for name, inner in value.items():
            yield from _set(f"{key}.{name}", inner, library, into)
    elif key not in reference.declared():
        yield whole_section(reference.sections()[key], key, value, COMMAND_LINE)
    elif problem := misplaced(key, value):
        yield Violation(key, value, COMMAND_LINE, problem)
    else:
        into.settings.append((key, value))


def _delete(key: str, value: object, library: Library, into: Words) -> Iterator[Violation]:
    if key == RECIPE:
        into.choices.pop(RECIPE, None)
    elif value is not None:
        yield Violation(f"~{key}", value, COMMAND_LINE, "deletes without a value", (f"~{key}",))
    elif key in library.groups():
        into.choices[key] = None
    elif key in reference.declared():
        into.settings.append((key, reference.declared()[key].default))
    elif key in reference.sections():
        for name, default in reference.defaults(reference.sections()[key]).items():
            into.settings.append((f"{key}.{name}", default))
    else:
        known = [*library.groups(), *reference.declared()]
        near = tuple(f"~{name}" for name in nearest_key(key, known))
        yield Violation(f"~{key}", None, COMMAND_LINE, "deletes a key that does not exist", near)


def _unknown(key: str, value: object, library: Library) -> Violation:
    """Return the violation for an unknown key on the command line, which may be meant as a group."""
    if "/" in key:
        group, _, option = key.partition("/")
        message = "unknown key; choose a group's option with `=`"
        advice = (to_override(group, option), to_override(group, value))
        return Violation(key, value, COMMAND_LINE, message, advice)
    plain = unknown_key(key, value, COMMAND_LINE)
    if equivalent(key) is not None:
        return plain
    named = nearest(key, library.groups()) if "." not in key else ()
    groups = (to_override(group, value) for group in named)
    suggestions = tuple(dict.fromkeys([*groups, *plain.suggestions]))[:3]
    return replace(plain, suggestions=suggestions)


def _sweep(override: Override, text: str) -> Violation:
    key = override.key_or_group
    commands = "`nanoscale plan` compares them, `nanoscale sweep` trains each"
    message = f"has several values, and a single run takes one; {commands}"
    raw = text.partition("=")[2]
    if key in reference.declared() and reference.declared()[key].takes_list:
        return Violation(key, raw, COMMAND_LINE, "takes a list in brackets", (f"'{key}=[{raw}]'",))
    if "," not in raw or "(" in raw:
        return Violation(key, raw, COMMAND_LINE, message)
    if key in FILTERS:
        message = "needs quotes of its own for its comma, inside those of the shell"
        return Violation(key, raw, COMMAND_LINE, message, (f"'{key}=\"{raw}\"'",))
    suggestions = (f"{key}={raw.partition(',')[0]}", f"'{key}=\"{raw}\"'")
    return Violation(key, raw, COMMAND_LINE, message, suggestions)


def _unreadable(word: str, library: Library) -> Violation:
    """Return the violation for a text outside Hydra's grammar: most often a lone name, or a value that needs
    quotes."""
    key, equals, value = word.partition("=")
    name = key.lstrip("+~")
    if not equals:
        meanings = tuple(_meanings(word, library))
        files = "a file is given as recipe=FILE, data.path=FILE or model.init_from=FOLDER"
        return Violation(
            word, None, COMMAND_LINE, "is not KEY=VALUE", meanings, files if is_path(word) else ""
        )
    if parsed(f"{key}={quoted(value)}") is None:
        names = tuple(to_override(near, value) for near in nearest_key(name, reference.declared()))
        return Violation(word, None, COMMAND_LINE, "cannot be read as KEY=VALUE", names)
    known = name in reference.declared() or name in reference.sections()
    known = known or reference.mapping_around(name) is not None
    if name not in library.groups() and not known:
        return _unknown(name, value, library)
    message = "has a value that needs quotes of its own, inside those of the shell"
    if value[:1] in _BRACKETS and (missing := _missing_brackets(value)):
        message = f"has a bracket that is not closed: `{missing}` is missing"
        return Violation(name, value, COMMAND_LINE, message, (shlex.quote(word + missing),))
    if value[:1] + value[-1:] == "[]":
        entries = [entry.strip() for entry in value[1:-1].split(",")]
        advice = shlex.quote(f"{key}={quoted(entries)}")
        return Violation(name, value, COMMAND_LINE, message, (advice,))
    return Violation(name, value, COMMAND_LINE, message, (to_override(key, value),))


_BRACKETS = {"{": "}", "[": "]", "(": ")"}


def _missing_brackets(value: str) -> str:
    """Return the missing closing brackets of a value; quoted ones count as well, which is rarely wrong."""
    open_ones: list[str] = []
    for character in value:
        if character in _BRACKETS:
            open_ones.append(_BRACKETS[character])
        elif open_ones and character == open_ones[-1]:
            open_ones.pop()
    return "".join(reversed(open_ones))


def _meanings(word: str, library: Library) -> Iterator[str]:
    for group in [RECIPE, *(group for group in library.groups() if group != RECIPE)]:
        if library.find(f"{group}/{word}") is not None:
            yield f"{group}={word}"
            return
    if word in library.groups():
        for option in list(library.options(word))[:2]:
            yield f"{word}={option}"
        if word in reference.sections():
            yield f"nanoscale config explain {word}"
        return
    for recipe in nearest(word, library.options(RECIPE), 1):
        yield f"{RECIPE}={recipe}"
    for key in nearest_key(word, reference.declared(), 2):
        yield to_override(key, reference.example(key))
