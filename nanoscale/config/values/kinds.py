"""Files of other trainers: read as data, and their kinds.

`kinds.yaml` lists the kinds. Nothing of a file is run: a shell script is read as text.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from nanoscale.common.errors import UserError, Violation
from nanoscale.common.units import listed
from nanoscale.config import reference
from nanoscale.config.from_deepspeed import read_json, read_text
from nanoscale.config.values import yaml_file
from nanoscale.config.values.equivalents import spelling


@dataclass(frozen=True)
class Kind:
    """A kind of file: a row of `kinds.yaml`."""

    name: str
    title: str
    marks: str
    defaults: Mapping[str, Any]


@cache
def kinds() -> tuple[Kind, ...]:
    """Return the kinds in the order in which they are recognized."""
    table = yaml_file.read(Path(yaml_file.__file__).with_name("kinds.yaml")).content
    return tuple(
        Kind(name, row["title"], row["marks"], row.get("defaults", {}))
        for name, row in table.items()
    )


def read_settings(file: Path) -> dict[str, Any]:
    """Read a file as what its ending says: JSON, TOML or YAML, and otherwise as words of a command line.

    Raises:
        UserError: it cannot be read or parsed.
    """
    if file.suffix == ".json":
        return read_json(file)
    text = read_text(file)
    if file.suffix == ".toml":
        try:
            return tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise UserError("usage", f"{file} is not TOML: {error}") from error
    if file.suffix in (".yaml", ".yml"):
        return yaml_file.parse(text, str(file)).content
    return read_json(file) if text.lstrip().startswith("{") else _options(text)


def kind_of(settings: Mapping[str, Any]) -> Kind | None:
    """Return the kind of a file's settings; None if it is none of `kinds`."""
    paths = [spelling(path) for path in flat_settings(settings)]
    names = {path[i:] for path in paths for i, one in enumerate(f".{path}") if one == "."}
    names |= {spelling(name) for name in settings}
    return next((it for it in kinds() if names & {*map(spelling, it.marks.split())}), None)


def refuse_foreign(file: Path) -> None:
    """Refuse a file of another trainer where a configuration of nanoscale is expected."""
    with suppress(UserError, RecursionError):
        settings = read_settings(file)
        if (kind := kind_of(settings)) and not (set(settings) & _ours() and file.suffix != ".toml"):
            advice = (f"nanoscale config from {shlex.quote(str(file))}",)
            message = f"is {kind.title}; a recipe is made of it"
            refused = Violation("", str(file), str(file), message, advice)
            raise UserError("config", f"{file}: {message}", [refused]) from None


def refuse_unknown(file: Path, settings: Mapping[str, Any]) -> NoReturn:
    if set(settings) & _ours():
        what = f"is a recipe already: nanoscale train recipe={shlex.quote(_as_path(file))}"
    else:
        what = "is not recognized; these are read: " + listed([it.title for it in kinds()])
    raise UserError("usage", f"{file} {what}")


def _ours() -> set[str]:
    return {"defaults", *(name for name in reference.sections() if name and "." not in name)}


def _as_path(file: Path) -> str:
    return str(file) if file.is_absolute() else f"./{file}"


def flat_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted paths and values; of a list of mappings, its first one."""
    plain = {
        name: value[0]
        if isinstance(value, list) and value and isinstance(value[0], dict)
        else value
        for name, value in settings.items()
    }
    result: dict[str, Any] = {}
    for name, value in plain.items():
        inner = flat_settings(value) if isinstance(value, Mapping) else None
        result |= {f"{name}.{path}": it for path, it in inner.items()} if inner else {name: value}
    return result


_WORD = re.compile(r""""((?:\\.|[^"\\])*)"|'([^']*)'|((?:\$\{[^}]*\}|[^\s"'()\\])+)""")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-(\"?)([^}]*?)\3)?\})")
_ASSIGNED = re.compile(
    r"""^\s*(?:export\s+)?([A-Za-z_]\w*)=("[^"\n]*"|[^\s(;]+)\s*(?:#.*)?$""", re.M
)


def _options(text: str) -> dict[str, Any]:
    """Return the options of a command line or a shell script, with its variables that are assigned once."""
    text = re.sub(r"(?m)(^|\s)#.*$", r"\1", text)
    assigned: dict[str, set[str]] = {}
    for name, value in _ASSIGNED.findall(text):
        assigned.setdefault(name, set()).add(value.strip('"'))
    variables = {name: values.pop() for name, values in assigned.items() if len(values) == 1}
    result: dict[str, list[str]] = {}
    for line in text.splitlines():
        option = ""
        for quoted, single, plain in _WORD.findall(line.partition(" | ")[0]):
            word = _filled(quoted or single or plain, variables)
            if word.startswith("--") and len(word) > 2:
                option, is_set, value = word.split()[0][2:].partition("=")
                values = [value.strip("'\"")] if is_set and value else word.split()[1:]
                result[option] = [it.strip("'\"") for it in values]
                option = "" if is_set and value else option
            elif re.match(r"[&|>;]|\d>|.*\.py$", word):
                option = ""
            elif option:
                result[option].append(word)
    return {name: typed_value(values) for name, values in result.items()}


def _filled(word: str, variables: Mapping[str, str], depth: int = 0) -> str:
    def one(match: re.Match[str]) -> str:
        name, default = match[1] or match[2], match[4]
        value = variables.get(name, default)
        if value is None or depth > 8 or len(value) > 1000:
            return match[0]
        if f"${{{name}" in value:  # NAME=${NAME:-default}
            value = _filled(value, {k: v for k, v in variables.items() if k != name}, depth + 1)
        return _filled(value, variables, depth + 1)

    return _VARIABLE.sub(one, word)


def typed_value(words: list[str]) -> Any:
    if len(words) != 1:
        return [typed_value([word]) for word in words] or True
    (word,) = words
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    for number in (int, float):
        with suppress(ValueError):
            return number(word)
    return word
