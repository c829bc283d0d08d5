"""The check of a request: the violations so far, and the values that were resolved.

The nearest legal values are advised: neighbors of a value, tried with the rules themselves.
"""

import json
import math
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, get_args

from nanoscale.common.devices import Devices
from nanoscale.common.errors import Violation
from nanoscale.common.versions import missing
from nanoscale.config import machines, reference
from nanoscale.config.machines import Host
from nanoscale.config.reference import value_of, with_values
from nanoscale.config.rules.rule import Rule, ignored, reset
from nanoscale.config.schema import BatchName, Config
from nanoscale.config.values.provenance import COMMAND_LINE, Composed
from nanoscale.config.violations import override, refuse

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


@dataclass
class Resolution:
    """A request, and the violations found so far."""

    composed: Composed
    devices: Devices
    """The devices of this machine."""
    hosts: tuple[Host, ...] = ()
    """The hosts of the ranks, if they are not simply this machine."""
    rules: tuple[Rule, ...] = ()
    """Every row of the tables. Advice breaks no rule that holds."""
    violations: list[Violation] = field(default_factory=list)
    kinds: set[str] = field(default_factory=set)

    @property
    def config(self) -> Config:
        return self.composed.config

    @cached_property
    def remote(self) -> bool:
        """True if ranks are started on other machines, whose devices are not known here."""
        if self.config.launcher.name in get_args(BatchName):
            return bool(self.hosts)
        return any(not machines.is_here(host.name) for host in self.hosts)

    @property
    def slots(self) -> int:
        """The ranks of all hosts together."""
        return sum(host.slots for host in self.hosts)

    def decide(self, **sections: Any) -> None:
        """Replace sections by resolved ones, for the rules that follow."""
        self.composed = replace(self.composed, config=replace(self.config, **sections))

    def refuse(
        self, key: str, message: str, *suggestions: str | None, kind: str = "config"
    ) -> None:
        """Record a violation of `key` as it was set."""
        text = self.composed.typed.get(key, "")
        is_its_text = self.composed.source(key) == COMMAND_LINE and "${" not in text
        value, typed = value_of(self.config, key), text if is_its_text else ""
        self.refuse_value(key, value, message, *suggestions, kind=kind, typed=typed)

    def refuse_value(
        self, key: str, value: Any, message: str, *suggestions: str | None,
        kind: str = "config", typed: str = "",
    ) -> None:  # fmt: skip
        """Record a violation of a key or of an entry of a mapping, with the value to show."""
        proposals = tuple(dict.fromkeys(text for text in suggestions if text))
        source = self.composed.source(key)
        self.add(kind, Violation(key, value, source, message, proposals, typed=typed))

    def apply(self, rules: Iterable[Rule]) -> None:
        """Record a violation for each rule that does not hold."""
        for rule in rules:
            if not rule.holds(self.config):
                text, proposals = rule.message, advice(self.config, rule, self.rules)
                text = text.format(c=self.config) if isinstance(text, str) else text(self.config)
                self.refuse(rule.key, text, *proposals, kind=rule.kind)

    def completed(self, text: str) -> str:
        """Return an override together with the overrides that the rules then require."""
        return completed(self.config, text, self.rules)

    def add(self, kind: str, violation: Violation) -> None:
        self.violations.append(violation)
        self.kinds.add(kind)

    def refuse_all(self) -> None:
        """Raise the UserError that carries all violations, if there are any."""
        if self.violations:
            refuse(self.violations, self.kinds.pop() if len(self.kinds) == 1 else "config")

    def refuse_idle(self, key: str, choice: str, *instead: str | None) -> None:
        """Refuse a key that has no meaning with another key's value: nothing is ignored silently."""
        if value_of(self.config, key) != reference.declared()[key].default:
            self.refuse(key, ignored(choice), reset(key), *instead)

    def more_rows(self, rows: int) -> str | None:
        """Return the override for a longer embedding, which a loaded model cannot have."""
        model = self.config.model
        loaded = model.source != "own" or model.init_from is not None
        return None if loaded else f"model.vocab={rows}"

    @property
    def same_python(self) -> bool:
        """True if the ranks run with this interpreter, so that its packages are theirs."""
        return not (self.remote or self.config.cluster.python)

    def require_for_ranks(self, key: str, package: str, *instead: str) -> None:
        """Refuse a key that needs a package which the ranks do not have.

        Only the preflight checks can inspect the interpreters of other hosts.
        """
        if self.same_python:
            self.require(key, package, *instead)

    def require(self, key: str, package: str, *instead: str) -> None:
        """Refuse a key that needs a package of an extra which is not installed."""
        if what := missing(package):
            self.refuse(key, f"needs {what}", *instead)


def divisors(number: int) -> Iterator[int]:
    """Yield the divisors in rising order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    yield from small
    yield from (number // n for n in reversed(small) if n * n != number)
