"""Strict conversion of plain data to the typed configuration, with all problems collected."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from nanoscale.common.errors import Violation
from nanoscale.config import reference
from nanoscale.config.schema import Config
from nanoscale.config.values.equivalents import equivalent
from nanoscale.config.violations import nearest, nearest_key, override, refuse, shown

Source = Callable[[str], str]
"""A function from a dotted key to the source of its value."""

_SUFFIXES = {"": 0, "k": 1, "M": 2, "G": 3, "T": 4}
_SCALED = re.compile(r"([0-9]+(?:\.[0-9]+)?(?:[eE]\+?[0-9]+)?)([kMGT]?)")


def to_config(raw: Mapping[str, Any], source: Source) -> Config:
    """Build the configuration; an absent key has its default.

    Raises:
        UserError: with every unknown key and every value of a wrong type or out of bounds.
    """
    config, violations = convert(raw, source)
    if violations:
        refuse(violations)
    return config


def convert(raw: Mapping[str, Any], source: Source) -> tuple[Config, list[Violation]]:
    """Build the configuration, and return the violations; wrong values are replaced by defaults."""
    violations: list[Violation] = []
    return _section(Config, "", raw, source, violations), violations


def unknown_key(name: str, value: object, source: str, file_section: str = "") -> Violation:
    """Return the violation for a key that the schema does not declare."""
    declared, sections = reference.keys_beside(name), reference.sections()
    message, advice = _elsewhere(name, value) if declared is reference.declared() else ("", ())
    if message:
        return Violation(name, value, source, message, advice)
    section, _, leaf = name.rpartition(".")
    known = [key for key in declared if not section or key.startswith(f"{section}.")]
    near = nearest_key(name, known) or nearest_key(name, declared)
    if not near and section:
        near = nearest_key(name, known, cutoff=0.5)
    message = "unknown key"
    if not near and known:
        of = section or "the configuration"
        names = (key.removeprefix(f"{section}.").partition(".")[0] for key in known)
        message = f"unknown key; {of} has {', '.join(dict.fromkeys(names))}"
    if file_section and leaf == file_section:
        message += f": in a file of the group {file_section}, its keys start at the left margin"
    if isinstance(value, Mapping):
        near = nearest(leaf, [part for part in sections if part])
        return Violation(name, value, source, message, tuple(f"{part}: …" for part in near))
    keys = []
    for key in near:
        keys += [it for it in declared if it.startswith(f"{key}.")] or [key]
    explain = tuple(f"nanoscale config explain {key}" for key in near)
    settings = tuple(_settings(keys, value)) or explain
    return Violation(name, value, source, message, settings[:3])


def _settings(keys: Iterable[str], value: object) -> Iterator[str]:
    """Yield the overrides of all keys that admit the value."""
    return (override(key, value) for key in keys if fits(key, value))


def _elsewhere(name: str, value: object) -> tuple[str, tuple[str, ...]]:
    """Return the note and the overrides for a name of another trainer; empty for other names."""
    if isinstance(value, Mapping):
        inner = [_elsewhere(f"{name}.{leaf}", of_leaf) for leaf, of_leaf in value.items()]
        overrides = [advice[0] for _, advice in inner if advice and "=" in advice[0]]
        if overrides:
            return "unknown key", (" ".join(overrides),)
    meant = equivalent(name)
    if meant is not None:
        advice = meant.commands
        if not advice and meant.keys:  # which may have values of their own
            explain = tuple(f"nanoscale config explain {key}" for key in meant.keys)
            advice = tuple(_settings(meant.keys, value)) or explain
        elif not advice:
            text = shown(value).lower().split()[0] if shown(value).split() else ""
            found = meant.overrides.get(text, meant.overrides.get(""))
            ways = dict.fromkeys(meant.overrides.values() if found is None else [found])
            advice = tuple(ways)
        return f"unknown key{'; it ' if meant.note else ''}{meant.note}", advice
    return "", ()


def _section(
    kind: type, prefix: str, raw: Mapping[str, Any], source: Source, violations: list[Violation]
) -> Any:
    members = reference.members(kind)
    for name in raw:
        if name not in members:
            dotted = f"{prefix}{name}"
            violations.append(unknown_key(dotted, raw[name], source(dotted)))
    values = {}
    for name, (annotation, _) in members.items():
        if name not in raw:
            continue
        dotted = f"{prefix}{name}"
        inner, entry = reference.section_of(annotation), reference.entry_type(annotation)
        if inner is not None and not (raw[name] is None and reference.optional(annotation)):
            values[name] = _inner(inner, dotted, raw[name], source, violations)
        elif entry is not None and isinstance(raw[name], Mapping):
            values[name] = {
                it: _inner(entry, f"{dotted}.{it}", content, source, violations)
                for it, content in raw[name].items()
            }
        else:
            if is_left_to_plan(dotted, raw[name]):
                continue  # the default, until the plan has chosen
            try:
                values[name] = value_of(dotted, raw[name])
            except _WrongError as wrong:
                violations.append(Violation(dotted, raw[name], source(dotted), *wrong.args))
    return kind(**values)


def _inner(kind: type, name: str, raw: object, source: Source, violations: list[Violation]) -> Any:
    if isinstance(raw, Mapping):
        return _section(kind, f"{name}.", raw, source, violations)
    violations.append(whole_section(kind, name, raw, source(name)))
    return kind()


def whole_section(kind: type, name: str, value: object, source: str) -> Violation:
    """Return the violation for a section that is given one value."""
    message = f"is a section: set its keys, as in {name}.{next(iter(reference.members(kind)))}=…"
    fitting = () if value is None else _settings(reference.keys_of(kind, name), value)
    return Violation(name, value, source, message, tuple(fitting)[:1])


class _WrongError(Exception):
    """The message on a wrong value, and a tuple of overrides in place of it."""


def value_of(name: str, raw: object) -> object:
    """Return the typed value of a key that is not a section."""
    key = reference.keys_beside(name)[name]
    for choice in reference.alternatives(key.annotation):
        matches, value = _match(choice, raw, key)
        if matches:
            _check_value(key, value)
            return value
    raise _WrongError(f"must be {key.type}{_SCALES[key.scaled]}", _repairs(key, raw))


def is_left_to_plan(name: str, raw: object) -> bool:
    """True if the plan chooses the value of a key."""
    key = reference.declared().get(name)
    return key is not None and key.planned and raw == reference.AUTO


def fits(name: str, raw: object) -> bool:
    """True if a key that is not a section allows a value; `recipe` stands for its choice."""
    if name == "recipe":
        return isinstance(raw, str)
    try:
        value_of(name, raw)
    except _WrongError:
        return False
    return True


def _match(choice: Any, raw: object, key: reference.Key) -> tuple[bool, object]:
    if get_origin(choice) is Literal:
        fits = any(raw == value and type(raw) is type(value) for value in get_args(choice))
        return fits, raw
    if choice is type(None):
        return raw is None, None
    if choice is int:
        if isinstance(raw, int):
            return not isinstance(raw, bool), raw
        if key.scaled == "no":
            return False, None
        if isinstance(raw, float) and raw.is_integer():
            return True, int(raw)
        parts = _SCALED.fullmatch(raw) if isinstance(raw, str) else None
        if parts is None:
            return False, None
        base = 1024 if key.scaled == "binary" else 1000
        value = float(parts[1]) * base ** _SUFFIXES[parts[2]]
        return (True, int(value)) if value.is_integer() else (False, None)
    if choice is float:
        number = isinstance(raw, (int, float)) and not isinstance(raw, bool)
        return (True, float(raw)) if number and math.isfinite(raw) else (False, None)  # type: ignore[arg-type]
    if choice is bool:
        return isinstance(raw, bool), raw
    if choice in (list[int], list[float]):
        entries = raw if isinstance(raw, list) else [None]
        matches = [_match(get_args(choice)[0], entry, key) for entry in entries]
        is_filled = bool(matches) or choice == list[float]
        return is_filled and all(fits for fits, _ in matches), [value for _, value in matches]
    if choice == list[str]:
        return isinstance(raw, list) and all(isinstance(entry, str) for entry in raw), raw
    if choice == dict[str, float]:
        pairs = raw.items() if isinstance(raw, dict) else [("", None)]
        numbers = {name: _match(float, entry, key) for name, entry in pairs}
        matched = {name: value for name, (fits, value) in numbers.items() if fits}
        return len(matched) == len(numbers), matched
    if get_origin(choice) is dict:
        return isinstance(raw, dict) and all(isinstance(name, str) for name in raw), raw
    return choice is str and isinstance(raw, str) and raw != "???", raw


_SCALES = {
    "no": "",
    "decimal": " (1e3, 5k, 2M, 1G and 1T can be written; k is 1000)",
    "binary": " (32k can be written; k is 1024)",
}
"""The text on the spelling of numbers, by `Key.scaled`."""


def _check_value(key: reference.Key, value: object) -> None:
    """Check the bounds of numbers, and that the home folders in paths exist, except in paths of the ranks'
    hosts (cluster, zero)."""
    low = -math.inf if key.at_least is None else key.at_least
    high = math.inf if key.at_most is None else key.at_most
    if isinstance(value, list):
        if any(isinstance(entry, int) and not low <= entry <= high for entry in value):
            raise _WrongError(f"must be {key.type}, {key.bounds}")
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        if value < low:
            raise _WrongError(f"must be {key.bounds}", (f"{key.name}={low:g}",))
        if value > high:
            raise _WrongError(f"must be {key.bounds}", (f"{key.name}={high}",))
    if key.path and key.name.partition(".")[0] in ("run", "model", "data", "launcher"):
        try:
            for text in reference.flat({key.name: value}).values():
                Path(text if isinstance(text, str) else "").expanduser()
        except RuntimeError:
            message = "begins with the home folder of a user that does not exist here"
            raise _WrongError(message) from None


def _repairs(key: reference.Key, raw: object) -> tuple[str, ...]:
    """Return overrides in place of a value of the wrong type."""
    if raw is None and fits(key.name, key.default):
        return (override(key.name, key.default),)
    kinds = reference.alternatives(key.annotation)
    literals = (get_args(choice) for choice in kinds if get_origin(choice) is Literal)
    choices = ["true", "false"] if bool in kinds else []
    choices += [str(value) for values in literals for value in values]
    if choices:
        near = () if isinstance(raw, bool) else nearest(str(raw), choices)
        return tuple(f"{key.name}={value}" for value in near or choices)
    if list[str] in kinds:
        entries = raw if isinstance(raw, list) else [raw]
        texts = [it if isinstance(it, str) else shown(it) for it in entries]
        return (override(key.name, texts),)
    if key.takes_list:
        # a list whose entries are recognizable: `8`, `3,3,2`, `3 3 2`, `[3.0, 3]`
        entries = raw if isinstance(raw, list) else re.split(r"[\s,;]+", str(raw).strip(" []()"))
        with suppress(TypeError, ValueError):
            numbers = [float(entry) for entry in entries]
            if numbers and all(number.is_integer() for number in numbers):
                return (override(key.name, [int(number) for number in numbers]),)
        return ()
    if str in kinds and isinstance(raw, (int, float)):
        return (override(key.name, shown(raw)),)
    if int in kinds and isinstance(raw, float) and raw.is_integer():
        return (f"{key.name}={int(raw)}",)
    if int in kinds and isinstance(raw, str) and (decimal := _SCALED.fullmatch(raw)):
        return (f"{key.name}={int(float(decimal[1]) * 1000 ** _SUFFIXES[decimal[2]])}",)
    if float in kinds and isinstance(raw, str):
        with suppress(ValueError):
            return (f"{key.name}={float(raw):g}",)
    return ()
