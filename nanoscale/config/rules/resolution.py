"""The check of a request: the violations so far, and the values that were resolved."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, get_args

from nanoscale.common.devices import Devices
from nanoscale.common.errors import Violation
from nanoscale.common.versions import missing
from nanoscale.config import machines, reference
from nanoscale.config.machines import Host
from nanoscale.config.reference import value_of
from nanoscale.config.rules.neighbors import advice, completed
from nanoscale.config.rules.rule import Rule, ignored, reset
from nanoscale.config.schema import BatchName, Config
from nanoscale.config.values.provenance import COMMAND_LINE, Composed
from nanoscale.config.violations import refuse


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
