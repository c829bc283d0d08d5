"""The schema as a table: every key by its dotted name, and every section.

Checks, conversion, did-you-mean and `config explain` look things up here.
"""

import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from functools import cache, reduce
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from nanoscale.config.schema import Config

Values = dict[str, Any]
"""Values of a configuration or of a part of it, by key."""
AUTO = "auto"
"""The value of a key that the plan chooses."""


@dataclass(frozen=True)
class Key:
    """One declared key. A section that may be null is a key as well as a section."""

    name: str
    annotation: Any
    default: object
    meaning: str
    unit: str
    at_least: float | None
    at_most: float | None
    scaled: str
    """`no`, `decimal` or `binary`: the suffixes that an integer may carry."""
    executes: bool | str
    """True if the value is code or a program; the name of the key on which that depends; else False."""
    path: bool
    """True if its texts name files or folders, and so may refer to environment variables."""
    planned: bool
    """True if the plan chooses the value if it is `auto`. The typed configuration then has the default."""

    @property
    def type(self) -> str:
        """The description of the annotation, to follow `must be`."""
        words = {
            int: "an integer",
            float: "a number",
            bool: "true or false",
            str: "a text",
            list[int]: "a list of integers",
            list[float]: "a list of numbers",
            list[str]: "a list of texts",
            dict[str, float]: "a mapping of numbers",
            type(None): "null",
        }
        parts = []
        for choice in alternatives(self.annotation):
            if get_origin(choice) is Literal:
                parts += [str(value) for value in get_args(choice)]
            else:
                is_mapping = get_origin(choice) is dict
                parts.append(words.get(choice, "a mapping" if is_mapping else "a section"))
        if get_origin(self.annotation) is Literal:
            return f"one of {', '.join(parts)}"
        return " or ".join(parts)

    @property
    def bounds(self) -> str:
        """`at least 1 and at most 3`; empty without bounds."""
        low = f"at least {self.at_least:g}" if self.at_least is not None else ""
        form = ",d" if isinstance(self.at_most, int) else "g"
        high = f"at most {self.at_most:{form}}" if self.at_most is not None else ""
        both = " and ".join(part for part in (low, high) if part)
        return f"each {both}" if both and self.takes_list else both

    @property
    def takes_mapping(self) -> bool:
        """True if its value is a mapping of another program's keys."""
        return any(get_origin(choice) is dict for choice in alternatives(self.annotation))

    @property
    def takes_list(self) -> bool:
        return any(get_origin(choice) is list for choice in alternatives(self.annotation))


@cache
def members(section: type) -> dict[str, tuple[Any, Field[Any]]]:
    """Return a section's keys: name to annotation and dataclass field."""
    hints = get_type_hints(section)
    return {field.name: (hints[field.name], field) for field in fields(section)}


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union; the annotation itself if it is none."""
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return (annotation,)


def section_of(annotation: Any) -> type | None:
    """Return the dataclass within an annotation, as in `RopeScaling | None`."""
    for choice in alternatives(annotation):
        if isinstance(choice, type) and is_dataclass(choice):
            return choice
    return None


def optional(annotation: Any) -> bool:
    return type(None) in alternatives(annotation)


@cache
def sections(section: type = Config, name: str = "") -> dict[str, type]:
    """Return every section in a section by its dotted name; the whole configuration is ``""``."""
    result = {name: section}
    for leaf, (annotation, _) in members(section).items():
        if (inner := section_of(annotation)) is not None:
            result |= sections(inner, f"{name}.{leaf}" if name else leaf)
    return result


@cache
def declared() -> dict[str, Key]:
    """Return every key by its dotted name, in the schema's order."""
    return {
        name: key
        for prefix, section in sections().items()
        if prefix
        for name, key in keys_of(section, prefix).items()
    }


@cache
def keys_of(section: type, prefix: str) -> dict[str, Key]:
    """Return the keys of a section of this dotted name, by their dotted names."""
    return {
        f"{prefix}.{name}": Key(
            f"{prefix}.{name}", _admitted(annotation, field), _default(field), **field.metadata
        )
        for name, (annotation, field) in members(section).items()
        if section_of(annotation) is None or optional(annotation)
    }


def keys_beside(name: str) -> dict[str, Key]:
    """Return the keys of the entry that a dotted name is in, as in `train.phases.NAME`; else every key."""
    mapping = declared().get(mapping_around(name) or "")
    kind = entry_type(mapping.annotation) if mapping else None
    return keys_of(kind, name.rpartition(".")[0]) if kind else declared()


def entry_type(annotation: Any) -> type | None:
    """Return the dataclass of the entries of a mapping; None if the annotation is not such a mapping."""
    return section_of(get_args(annotation)[1]) if get_origin(annotation) is dict else None


def _admitted(annotation: Any, field: Field[Any]) -> Any:
    """Return the annotation, with `auto` in addition if the plan may choose the value."""
    if not field.metadata["planned"]:
        return annotation
    if get_origin(annotation) is Literal:
        return Literal[(*get_args(annotation), AUTO)]
    return annotation | Literal[AUTO]


def value_of(config: Config, key: str) -> Any:
    return reduce(getattr, key.split("."), config)


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """Return the configuration with other values of keys, whose sections are not null."""
    for key, value in values.items():
        names = key.split(".")
        while names:
            name = names.pop()
            value = replace(reduce(getattr, names, config), **{name: value})
        config = value
    return config


def nested(values: Mapping[str, Any]) -> Values:
    """Return values by dotted names as nested mappings."""
    result: Values = {}
    for key, value in values.items():
        for name in reversed(key.split(".")):
            value = {name: value}
        result = merged(result, value)
    return result


def flat(
    values: Mapping[str, Any], prefix: str = "", stop: Callable[[str], bool] = lambda _: False
) -> Values:
    """Return the leaves of nested mappings by their dotted names; an empty mapping has none.

    A mapping is a leaf if `stop` is True for its name.
    """
    leaves: Values = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and not stop(f"{prefix}{name}"):
            leaves |= flat(value, f"{prefix}{name}.", stop)
        else:
            leaves[f"{prefix}{name}"] = value
    return leaves


def merged(values: Mapping[str, Any], others: Mapping[str, Any]) -> Values:
    """Return nested mappings with the leaves of others, which take precedence."""
    result = dict(values)
    for name, value in others.items():
        both = isinstance(value, Mapping) and isinstance(result.get(name), Mapping)
        result[name] = merged(result[name], value) if both else value
    return result


def defaults(section: type) -> Values:
    """Return a section's defaults as plain data."""
    return {
        name: defaults(inner)
        if (inner := section_of(annotation)) is not None and not optional(annotation)
        else _default(field)
        for name, (annotation, field) in members(section).items()
    }


def mapping_around(name: str) -> str | None:
    """Return the declared key whose mapping contains a dotted name; None if there is none."""
    parts = name.split(".")
    prefixes = (".".join(parts[:end]) for end in range(1, len(parts)))
    return next(filter(is_mapping, prefixes), None)


def is_mapping(name: str) -> bool:
    """True if the key of this name has a mapping as its value."""
    return name in declared() and declared()[name].takes_mapping


def example(name: str) -> object:
    """Return a valid value of a key: its default, else the smallest or the first."""
    key = declared()[name]
    if key.default not in (None, "", [], {}):
        return key.default
    kinds = alternatives(key.annotation)
    for choice in kinds:
        if get_origin(choice) is Literal:
            return get_args(choice)[0]
    if int in kinds or float in kinds:
        return int(key.at_least or 1)
    return name.rpartition(".")[2] if str in kinds else key.default


def meaning(name: str) -> str:
    """Return one line on a key or a section."""
    if name in declared():
        return declared()[name].meaning
    return (sections()[name].__doc__ or "").strip().splitlines()[0]


def _default(field: Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default
