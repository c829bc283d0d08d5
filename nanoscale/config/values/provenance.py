"""Provenance: every writer of every key, in the order in which Hydra merged them."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from nanoscale.common.errors import Violation
from nanoscale.config import reference
from nanoscale.config.schema import Config
from nanoscale.config.values.yaml_file import YamlDocument
from nanoscale.config.violations import refuse

DEFAULT = "default"
COMMAND_LINE = "command line"
"""The source of overrides, and the beginning of the source of an option's value."""


@dataclass(frozen=True)
class Setting:
    """One writer of one key."""

    value: object
    source: str
    """`nanoscale/conf/model/llama-8b.yaml:7`, `command line`, `command line: --hostfile`, `default`."""


History = dict[str, list[Setting]]


@dataclass(frozen=True)
class Layer:
    """One file in the order of merging, with the section that its keys belong to."""

    document: YamlDocument
    section: str

    @property
    def content(self) -> dict[str, Any]:
        """Its values, without its list of defaults, as a part of the configuration."""
        values = {name: it for name, it in self.document.content.items() if name != "defaults"}
        return {self.section: values} if self.section else values

    def source(self, key: str) -> str:
        """Return the file and the line of a key."""
        return self.document.source(key.removeprefix(f"{self.section}."))


def trace(layers: Iterable[Layer], settings: Iterable[tuple[str, Setting]]) -> History:
    """Return the writers of every key, the effective one last; the command line's overrides come last."""
    history: History = {}
    for layer in layers:
        for key, value in reference.flat(layer.content, stop=reference.is_mapping).items():
            record(history, key, Setting(value, layer.source(key)))
    for key, setting in settings:
        mapping = reference.mapping_around(key)
        if mapping is not None:
            inner = {key.removeprefix(f"{mapping}."): setting.value}
            setting, key = replace(setting, value=reference.nested(inner)), mapping
        record(history, key, setting)
    return history


def record(history: History, key: str, setting: Setting) -> None:
    """Record a writer. Null on a section empties it; a key within a null section revives it."""
    parent = key.rpartition(".")[0]
    if parent in history:
        del history[parent]
        for name, value in reference.defaults(reference.sections()[parent]).items():
            history[f"{parent}.{name}"] = [Setting(value, DEFAULT)]
    if key in reference.sections():
        for name in reference.members(reference.sections()[key]):
            history.pop(f"{key}.{name}", None)
    settings = history.setdefault(key, [])
    if not settings or settings[-1] != setting:
        settings.append(setting)


@dataclass(frozen=True)
class Composed:
    """A configuration as requested; `auto` and null values are not resolved yet."""

    config: Config
    history: History
    """Dotted key → its writers in order, from the schema's default to the effective one."""
    recipe: str | None
    """The name from which the run's name is built."""
    words: tuple[str, ...]
    unasked: frozenset[str] = frozenset({DEFAULT})
    """Sources that nobody chose for this job: defaults, default options of groups, a frozen file."""
    typed: Mapping[str, str] = field(default_factory=dict)
    """Key → the text of its value on the command line."""
    opened: Mapping[str, object] = field(default_factory=dict)
    """The keys that the frozen configuration had left open, with their requested values."""
    left_to_plan: frozenset[str] = frozenset()
    """The keys that are `auto` and that the plan chooses. `config` has their defaults until it has chosen."""

    @property
    def requested(self) -> Config:
        """The configuration before it was resolved; open keys of a frozen one stay open."""
        values = {key: value for key, value in self.opened.items() if not self.by_hand(key)}
        values |= dict.fromkeys(self.left_to_plan, reference.AUTO)
        return reference.with_values(self.config, values)

    def source(self, key: str) -> str:
        """Return the source that set a key, or the mapping around it, last."""
        settings = self.history.get(key) or self.history.get(reference.mapping_around(key) or key)
        return settings[-1].source if settings else DEFAULT

    def violation(self, key: str, message: str, *suggestions: str, remedy: str = "") -> Violation:
        """Return a violation of a key as it was set."""
        value = reference.value_of(self.config, key)
        return Violation(key, value, self.source(key), message, suggestions, remedy)

    def refuse(
        self, key: str, message: str, *suggestions: str, kind: str = "config", remedy: str = ""
    ) -> NoReturn:
        """Raise the UserError of one violation."""
        refuse([self.violation(key, message, *suggestions, remedy=remedy)], kind)

    def within(self, key: str) -> list[str]:
        """List the key, if something set it, and the keys in it, in the order of the history."""
        return [name for name in self.history if f"{name}.".startswith(f"{key}.")]

    def by_hand(self, key: str) -> bool:
        """True if the command line set a key."""
        return self.source(key).startswith(COMMAND_LINE)

    def by_user(self, key: str) -> bool:
        """True if the command line or a recipe of the user set a key: no packaged recipe or default."""
        is_packaged = self.source(key).startswith("nanoscale/")
        return self.by_hand(key) or (self.asked_for(key) and not is_packaged)

    def by_hand_around(self, key: str) -> bool:
        """True if the command line set a key, anything in it, or a section or mapping that contains it."""
        around = key.split(".")
        names = [".".join(around[:end]) for end in range(2, len(around) + 1)]
        return any(map(self.by_hand, names + self.within(key)))

    def asked_for(self, key: str) -> bool:
        """True if the command line or a recipe set a key, or chose the option that did."""
        file = re.sub(r":[0-9]+$", "", self.source(key))
        return file not in self.unasked
