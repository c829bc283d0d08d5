"""The check of a request, and the arithmetic of legal neighbors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.util import find_spec
from typing import Any

from nanoscale.common.devices import Devices
from nanoscale.common.errors import Violation
from nanoscale.common.versions import install_command
from nanoscale.config import hostnames, reference
from nanoscale.config.machines import Host
from nanoscale.config.reference import value_of
from nanoscale.config.schema import Config
from nanoscale.config.values.provenance import Composed
from nanoscale.config.violations import override


@dataclass(frozen=True, eq=False)
class Rule:
    """A rule of the layout: `check` refuses with it, and the search enumerates with it.

    Its functions get a configuration with the model, the precision and `parallel.dp` resolved.
    """

    key: str
    """The key that a violation names."""
    reads: tuple[str, ...]
    """Every key that `holds` depends on."""
    holds: Callable[[Config], bool]
    message: Callable[[Config], str]
    """The sentence that follows the key and its value."""
    nearest: Callable[[Config], Iterable[str | None]]
    """The nearest legal values, as overrides to paste."""
    kind: str = "layout"
    """The kind of the error."""


def idle(
    key: str,
    reads: tuple[str, ...],
    concerns: Callable[[Config], bool],
    beside: str,
    kind: str = "layout",
) -> Rule:
    """Return the rule that a key keeps its default where it has no meaning: nothing is ignored silently.

    Args:
        concerns: True if the key has a meaning.
        beside: the setting that gives it no meaning; `{c}` in it is the configuration.
    """
    usual = reference.declared()[key].default
    return Rule(
        key,
        (key, *reads),
        lambda config: value_of(config, key) == usual or concerns(config),
        lambda config: _ignored(beside.format(c=config)),
        lambda _: [override(key, usual)],
        kind,
    )


def data_parallel(config: Config) -> int:
    """Return the data-parallel degree, which is resolved before the rules of the layout."""
    dp = config.parallel.dp
    assert isinstance(dp, int)
    return dp


def _ignored(beside: str) -> str:
    return f"does not concern {beside} and would be ignored"


@dataclass
class Resolution:
    """A request, and the violations found so far."""

    composed: Composed
    devices: Devices
    """The devices of this machine."""
    hosts: tuple[Host, ...] = ()
    """The hosts of the ranks, if they are not simply this machine."""
    violations: list[Violation] = field(default_factory=list)
    kinds: set[str] = field(default_factory=set)

    @property
    def config(self) -> Config:
        return self.composed.config

    @cached_property
    def remote(self) -> bool:
        """True if ranks are started on other machines, whose devices are not known here."""
        if self.config.launcher.name == "slurm":
            return bool(self.hosts)
        return any(not hostnames.is_here(host.name) for host in self.hosts)

    @property
    def slots(self) -> int:
        """The ranks of all hosts together."""
        return sum(host.slots for host in self.hosts)

    def decide(self, **sections: Any) -> None:
        """Replace sections by resolved ones, for the rules that follow."""
        self.composed = replace(self.composed, config=replace(self.config, **sections))

    def refuse(self, kind: str, key: str, message: str, *suggestions: str | None) -> None:
        """Record a violation of `key` as it was set."""
        value = value_of(self.config, key)
        proposals = tuple(dict.fromkeys(text for text in suggestions if text))
        typed, source = self.composed.as_typed(key), self.composed.source(key)
        self.add(kind, Violation(key, value, source, message, proposals, typed=typed))

    def apply(self, rules: Iterable[Rule]) -> None:
        """Record a violation for each rule that does not hold."""
        for rule in rules:
            if not rule.holds(self.config):
                message, nearest = rule.message(self.config), rule.nearest(self.config)
                self.refuse(rule.kind, rule.key, message, *nearest)

    def add(self, kind: str, violation: Violation) -> None:
        self.violations.append(violation)
        self.kinds.add(kind)

    def refuse_idle(self, kind: str, key: str, beside: str, *instead: str | None) -> None:
        """Refuse a key that has no meaning with another key's value: nothing is ignored silently."""
        usual = reference.declared()[key].default
        if value_of(self.config, key) != usual:
            message = _ignored(beside)
            usually = f"~{key}" if isinstance(usual, dict) else override(key, usual)
            self.refuse(kind, key, message, usually, *instead)

    def more_rows(self, rows: int) -> str | None:
        """Return the override for a longer embedding, which a loaded model cannot have."""
        model = self.config.model
        loaded = model.source == "hf" or model.init_from is not None
        return None if loaded else f"model.vocab={rows}"

    @property
    def same_python(self) -> bool:
        """True if the ranks run with this interpreter, so that its packages are theirs."""
        cluster = self.config.cluster
        return not (self.remote or cluster.python or cluster.pythons)

    def require_for_ranks(self, key: str, package: str, name: str, *instead: str) -> None:
        """Refuse a key that needs a package which the ranks do not have.

        Only the preflight checks can inspect the interpreters of other hosts.
        """
        if self.same_python:
            self.require(key, package, name, *instead)

    def require(self, key: str, package: str, name: str, *instead: str) -> None:
        """Refuse a key that needs a package of an extra which is not installed."""
        if find_spec(package) is None:
            message = f"needs {name}, which is not installed: {install_command(package)}"
            self.refuse("config", key, message, *instead)


def near_divisors(number: int, value: int) -> list[int]:
    """Return the divisors of `number` around `value`: the largest not above it, the smallest not below."""
    all_of_them = list(divisors(number))
    below = [n for n in all_of_them if n <= value]
    above = [n for n in all_of_them if n >= value]
    return list(dict.fromkeys([*below[-1:], *above[:1]]))


def divisors(number: int) -> Iterator[int]:
    """Yield the divisors in rising order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    yield from small
    yield from (number // n for n in reversed(small) if n * n != number)


def near_multiples(step: int, value: int) -> list[int]:
    """Return the multiples of `step` around `value`, without 0."""
    below = value // step * step
    return [n for n in (below, below + step) if n > 0]
