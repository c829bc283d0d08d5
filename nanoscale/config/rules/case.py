"""A request on trial, and the arithmetic of legal neighbours."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import reduce
from importlib.util import find_spec

from nanoscale.config import reference
from nanoscale.config.compose import Composed
from nanoscale.config.report import shown
from nanoscale.config.schema import Config
from nanoscale.devices import Devices
from nanoscale.errors import Violation


@dataclass(frozen=True)
class Host:
    """A host that is to be used, and how much of it."""

    name: str
    """as ssh is given it: may be `user@host` or an IPv6 address"""
    slots: int
    """ranks to start there"""
    devices: tuple[int, ...] | None = None
    """which of its devices, where a filter chose some"""
    source: str = ""
    """`hosts:3`, where it was named"""

    @property
    def address(self) -> str:
        return self.name.rpartition("@")[2].strip("[]")


@dataclass
class Case:
    """What was asked for, and what was found wrong with it so far."""

    composed: Composed
    devices: Devices
    violations: list[Violation] = field(default_factory=list)
    kinds: set[str] = field(default_factory=set)

    @property
    def config(self) -> Config:
        return self.composed.config

    def refuse(self, kind: str, key: str, message: str, *suggestions: str | None) -> None:
        """Record a violation of `key` as it was set."""
        value = reduce(getattr, key.split("."), self.config)
        proposals = tuple(dict.fromkeys(text for text in suggestions if text))
        self.violations.append(Violation(key, value, self.composed.source(key), message, proposals))
        self.kinds.add(kind)

    def refuse_idle(self, kind: str, key: str, beside: str) -> None:
        """Nothing is silently ignored: refuse a key that means nothing beside another's value."""
        usual = reference.declared()[key].default
        if reduce(getattr, key.split("."), self.config) != usual:
            message = f"does not concern {beside} and would be ignored"
            self.refuse(kind, key, message, f"{key}={shown(usual)}")

    def require(self, key: str, package: str, name: str, *instead: str) -> None:
        """Refuse a key that needs a package of an extra which is not installed."""
        if find_spec(package) is None:
            message = f"needs {name}, which is not installed: pip install 'nanoscale[{package}]'"
            self.refuse("config", key, message, *instead)


def near_divisors(number: int, value: int) -> list[int]:
    """The divisors of `number` around `value`: the largest not above it, the smallest not below."""
    all_of_them = list(divisors(number))
    below = [n for n in all_of_them if n <= value]
    above = [n for n in all_of_them if n >= value]
    return list(dict.fromkeys([*below[-1:], *above[:1]]))


def divisors(number: int) -> Iterator[int]:
    """In rising order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    yield from small
    yield from (number // n for n in reversed(small) if n * n != number)


def near_multiples(step: int, value: int) -> list[int]:
    """The multiples of `step` around `value`, without 0."""
    below = value // step * step
    return [n for n in (below, below + step) if n > 0]


def counted(number: int, noun: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listed(words: list[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
