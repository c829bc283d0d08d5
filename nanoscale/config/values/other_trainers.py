"""Files of other trainers: read as data, and their kinds.

`other_trainers.yaml` lists the kinds. Nothing of a file is run: a shell script is read as text.
"""

import re
import shlex
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from nanoscale.common.errors import UserError, Violation
from nanoscale.common.json_text import Json, parse
from nanoscale.common.units import listed
from nanoscale.config import reference
from nanoscale.config.values import yaml_file
from nanoscale.config.values.equivalents import spelling
from nanoscale.config.violations import override, refuse


class Kind(NamedTuple):
    """A kind of file: a row of `other_trainers.yaml`."""

    name: str
    title: str
    marks: str
    sections: str = ""
    defaults: Mapping[str, Any] = {}
    unread: str = ""
    main: str = ""
    file: str = ""
    example: str = ""


@cache
def kinds() -> tuple[Kind, ...]:
    """Return the kinds in the order in which they are recognized."""
    table = yaml_file.read(Path(__file__).with_suffix(".yaml")).content
    return tuple(Kind(name, **row) for name, row in table.items())


def read_json(path: Path) -> Json:
    """Read a JSON object. Raises a UserError if the file holds none."""
    try:
        content = parse(yaml_file.read_text(path, str(path)))
    except ValueError as error:
        raise UserError("usage", f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError("usage", f"{path} holds no JSON object")
    return content


def read_settings(file: Path) -> Json:
    """Read a file as what its ending says, JSON, TOML or YAML, and otherwise as options. Raises UserErrors."""
    if file.suffix == ".py":
        why = "as torchtitan's registry of configurations: Python is not read, and nothing of a file is run"
        raise UserError("usage", f"{file} is a program, {why}")
    if file.suffix == ".json":
        return read_json(file)
    text = yaml_file.read_text(file, str(file))
    if file.suffix == ".toml":
        try:
            return tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise UserError("usage", f"{file} is not TOML: {error}") from error
    if file.suffix in (".yaml", ".yml"):
        content = yaml_file.parse(text, str(file)).content
        inner = content.get("MODEL_ARGS")  # Megatron's
        return content | inner if isinstance(inner, dict) else content
    return read_json(file) if text.lstrip().startswith("{") else _options(text)


def kind_of(settings: Mapping[str, Any]) -> Kind | None:
    """Return the first kind of which a file has at least two marks; None if it is none of `kinds`."""
    names: set[str] = set()
    for path in map(spelling, flat_settings(settings)):
        names |= {path[:i] for i, one in enumerate(f"{path}.") if one == "."}
    return next((it for it in kinds() if len(names & {*map(spelling, it.marks.split())}) > 1), None)


def refuse_foreign(file: Path) -> None:
    """Refuse a file of another trainer where a configuration of nanoscale is expected."""
    kind = None
    with suppress(UserError):
        kind = kind_of(read_settings(file))
    if kind is not None:
        message = f"is {kind.title}; " + (kind.unread or "a recipe is made of it")
        advice = () if kind.unread else (f"nanoscale config from {shlex.quote(str(file))}",)
        refuse([Violation("", str(file), str(file), message, advice)])


def refuse_unread(file: Path, settings: Mapping[str, Any], kind: Kind | None) -> NoReturn:
    """Refuse a file that is not read, by its kind if it has one."""
    titles = listed([it.title for it in kinds() if not it.unread])
    what = f"is not recognized; these are read: {titles}"
    if kind is not None:
        what = f"is {kind.title}, which is not read: {kind.unread}. These are read: {titles}"
    elif settings.keys() <= {"defaults", *reference.sections()} and settings:
        path = str(file) if file.is_absolute() else f"./{file}"
        what = f"is a recipe already: nanoscale train {override('recipe', path)}"
    raise UserError("usage", f"{file} {what}")


def flat_settings(settings: Mapping[str, Any]) -> Json:
    """Return dotted paths and values; of a list of mappings, its first one."""
    result: Json = {}
    for name, value in settings.items():
        first = value[0] if isinstance(value, list) and value else value
        inner = flat_settings(first) if isinstance(first, Mapping) else {}
        result |= {f"{name}.{path}": it for path, it in inner.items()} or {name: value}
    return result


_WORD = re.compile(r""""((?:\\.|[^"\\])*)"|'([^']*)'|((?:\$\{[^}]*\}|[^\s"'()\\])+)""")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-(\"?)([^}]*?)\3)?\})")
_ASSIGNED = re.compile(
    r"""^\s*(?:export\s+)?([A-Za-z_]\w*)=("[^"\n]*"|[^\s(;]+)\s*(?:#.*)?$""", re.M
)


def _options(text: str) -> Json:
    """Return the options of a command line or a shell script, with its variables that are assigned once."""
    text = re.sub(r"(?m)(^|\s)#.*$", r"\1", text)
    assigned: dict[str, set[str]] = {}
    for name, value in _ASSIGNED.findall(text):  # in NAME=${NAME:-x}, its default counts
        own = re.fullmatch(rf"\$\{{{name}:?-(.*)\}}", value.strip('"'))
        assigned.setdefault(name, set()).add((own[1] if own else value).strip('"'))
    variables = {name: values.pop() for name, values in assigned.items() if len(values) == 1}
    result: dict[str, list[str]] = {}
    for line in text.splitlines():
        option = ""
        for quoted, single, plain in _WORD.findall(line.partition(" | ")[0]):
            word = _filled(quoted or single or plain, variables)
            if word.startswith("--") and len(word) > 2:
                option, _, value = word.split()[0][2:].partition("=")
                values = [value] if value else word.split()[1:]
                result[option] = [it.strip("'\"") for it in values]
                option = "" if value else option
            elif re.match(r"[&|>;]|\d>|.*\.py$", word):
                option = ""
            elif option:
                result[option].append(word)
    return {name: typed_value(values) for name, values in result.items()}


def _filled(word: str, variables: Mapping[str, str]) -> str:
    for _ in range(5):
        word = _VARIABLE.sub(lambda it: variables.get(it[1] or it[2], it[4] or it[0]), word[:1000])
    return word


def typed_value(words: list[str]) -> Any:
    """Return the value of an option: a truth, a number, a text, or a list of several."""
    if len(words) != 1:
        return [typed_value([word]) for word in words] or True
    (word,) = words
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    for number in (int, float):
        with suppress(ValueError):
            return number(word)
    return word
