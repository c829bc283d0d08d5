"""The nearest legal values: neighbors of a value, tried with the rules themselves."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from nanoscale.config import reference
from nanoscale.config.reference import value_of, with_values
from nanoscale.config.rules.rule import Rule
from nanoscale.config.schema import Config
from nanoscale.config.violations import override

_FARTHEST = 8192
"""The distance at which no further neighbors are tried."""
_MOST_CORRECTED = 4
"""The most rules that a change may break, if their own advice corrects the configuration."""

Changes = dict[str, Any]
"""New values by key."""


def advice(config: Config, rule: Rule, rules: Sequence[Rule]) -> list[str]:
    """Return overrides after which a broken rule holds, and every other rule that holds now."""
    kept = [other for other in rules if other is not rule and other.holds(config)]
    return list(_legal(config, rule, kept)) or list(_legal(config, rule, ()))


def completed(config: Config, text: str, rules: Sequence[Rule]) -> str:
    """Return an override together with the overrides that it requires."""
    kept = [other for other in rules if other.holds(config)]
    changes = _corrected(config, _read(text), None, kept)
    return text if changes is None else _written(changes)


def _legal(config: Config, rule: Rule, kept: Sequence[Rule]) -> Iterator[str]:
    for text in _texts(config, rule):
        if text.rstrip("<") not in reference.declared() and not _read(text):
            yield text  # an option of a group, or of the command line
            continue
        for candidates in _series(config, text):
            tried = (_corrected(config, changes, rule, kept) for changes in candidates)
            changes = next((changes for changes in tried if changes is not None), None)
            if changes is not None:
                yield text if changes == _read(text) else _written(changes)


def _texts(config: Config, rule: Rule) -> Iterator[str]:
    for text in [rule.advice] if callable(rule.advice) else rule.advice:
        if callable(text):
            yield from filter(None, text(config))
        else:
            yield text.format(c=config) if "{c." in text else text


def _series(config: Config, text: str) -> list[Iterable[Changes]]:
    """Return the candidates in each direction, the nearest first."""
    if "=" in text:
        return [[_read(text)]]
    key, smaller_only = text.rstrip("<"), text.endswith("<")
    value, declared = value_of(config, key), reference.declared()[key]
    if not isinstance(value, int):
        return []
    least = max(int(declared.at_least or 0), value - _FARTHEST)
    below = ({key: number} for number in range(value - 1, least - 1, -1))
    above = ({key: number} for number in range(value + 1, value + _FARTHEST))
    return [below] if smaller_only else [below, above]


def _corrected(
    config: Config, changes: Changes, rule: Rule | None, kept: Sequence[Rule]
) -> Changes | None:
    """Return the changes, with the changes that the kept rules then advise; None if a rule stays broken."""
    changed = with_values(config, changes)
    if rule is not None and not rule.holds(changed):
        return None
    broken = next((other for other in kept if not other.holds(changed)), None)
    if broken is None:
        return changes
    if len(changes) > _MOST_CORRECTED:
        return None
    for text in _texts(changed, broken):
        more = {} if "/path/to" in text else _read(text)
        if more and more.keys().isdisjoint(changes):
            corrected = _corrected(config, {**changes, **more}, rule, kept)
            if corrected is not None:
                return corrected
    return None


def _read(text: str) -> Changes:
    """Return the values that overrides set; nothing if one is not `KEY=VALUE`."""
    changes: Changes = {}
    for word in shlex.split(text):
        key, equals, value = word.partition("=")
        section = key.rpartition(".")[0]
        if not equals or key not in reference.declared() or section in reference.declared():
            return {}
        try:
            changes[key] = json.loads(value)
        except ValueError:
            changes[key] = value[1:-1].split(",") if value.startswith("[") else value
    return changes


def _written(changes: Changes) -> str:
    return " ".join(override(key, value) for key, value in changes.items())
