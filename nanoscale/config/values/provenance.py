"""Provenance: every writer of every key, in the order in which Hydra merged them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from nanoscale.config import reference
from nanoscale.config.values.yaml_file import YamlDocument

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


def trace(layers: Iterable[Layer], settings: Iterable[tuple[str, Setting]]) -> History:
    """Return the writers of every key, the effective one last; the command line's overrides come last."""
    history: History = {}
    for layer in layers:
        for path, value in _leaves(layer.document.content, "", layer.section):
            key = f"{layer.section}.{path}" if layer.section else path
            record(history, key, Setting(value, layer.document.source(path)))
    for key, setting in settings:
        mapping = reference.mapping_around(key)
        if mapping is not None:
            nested = _nested(key.removeprefix(f"{mapping}."), setting.value)
            setting, key = replace(setting, value=nested), mapping
        record(history, key, setting)
    return history


def _nested(path: str, value: object) -> object:
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


def _leaves(content: Mapping[str, Any], prefix: str, section: str) -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        whole = f"{section}.{prefix}{name}" if section else f"{prefix}{name}"
        if isinstance(value, Mapping) and not reference.is_mapping(whole):
            yield from _leaves(value, f"{prefix}{name}.", section)
        elif name != "defaults":
            yield f"{prefix}{name}", value


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
