"""The overrides of a sweep: what all trials share, and the values of each key that differs."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path

from hydra.core.override_parser.types import ChoiceSweep, Glob, IntervalSweep, Override, RangeSweep

from nanoscale.common.errors import Violation
from nanoscale.config import reference
from nanoscale.config.composing.library import Library
from nanoscale.config.composing.overrides import parsed
from nanoscale.config.composing.variants import given_twice, values_problem
from nanoscale.config.values.provenance import COMMAND_LINE
from nanoscale.config.violations import refuse

_OWN = ("run.name", "run.root")
"""Keys that the sweep sets for each trial."""
_PROBES = 3
"""Trials of a sampler that are checked before the first starts."""
_LONGEST = 160
"""The most characters of a trial's name."""


@dataclass(frozen=True)
class Interval:
    """A range of numbers that a sampler draws from; both ends are included."""

    low: float
    high: float
    logarithmic: bool
    integer: bool


@dataclass(frozen=True)
class Dimension:
    """A key or group with several values."""

    key: str
    values: tuple[str, ...] = ()
    """The texts of its values; empty for an interval."""
    interval: Interval | None = None


@dataclass(frozen=True)
class Space:
    """The overrides of a sweep."""

    shared: tuple[str, ...]
    """Overrides that are the same in all trials."""
    dimensions: tuple[Dimension, ...]

    def grid(self) -> list[dict[str, str]]:
        """Return all combinations, the last key varying fastest: the values of each trial by key.

        Raises:
            UserError: a key has an interval, whose numbers only a sampler can choose.
        """
        drawn = [one for one in self.dimensions if one.interval is not None]
        if drawn:
            message = "is an interval, which needs a sampler that draws from it"
            advice = ("--sampler tpe --trials 20",)
            refuse([Violation(one.key, None, COMMAND_LINE, message, advice) for one in drawn])
        keys = [one.key for one in self.dimensions]
        return [
            dict(zip(keys, values, strict=True))
            for values in product(*(one.values for one in self.dimensions))
        ]

    def probes(self) -> list[dict[str, str]]:
        """Return values at the ends and in the middle of all dimensions, in place of a sampler's own."""
        probes = []
        for share in range(_PROBES):
            values = {}
            for one in self.dimensions:
                if one.interval is None:
                    values[one.key] = one.values[share * (len(one.values) - 1) // (_PROBES - 1)]
                else:
                    width = one.interval.high - one.interval.low
                    number = one.interval.low + width * share / (_PROBES - 1)
                    text = str(round(number)) if one.interval.integer else f"{number:.6g}"
                    values[one.key] = text
            probes.append(values)
        return probes

    def overrides(self, values: dict[str, str]) -> tuple[str, ...]:
        """Return the overrides of the trial with these values."""
        return (*self.shared, *(f"{key}={value}" for key, value in values.items()))

    def name(self, values: dict[str, str]) -> str:
        """Return the name of the trial's run: what differs, with the shortest names of keys that are clear."""
        short = _short_names([one.key for one in self.dimensions])
        text = ",".join(f"{short[key]}={value}" for key, value in values.items())
        kept = "".join(
            "-" if char in "/\\" or not char.isprintable() or char.isspace() else char
            for char in text
        )
        return kept.replace("'", "").replace('"', "")[:_LONGEST]


def read_space(overrides: Sequence[str], config_dir: Path | None = None) -> Space:
    """Read the overrides of a sweep. Unreadable ones are left for `compose` to refuse.

    Raises:
        UserError: no key has several values, or a key cannot differ between trials.
    """
    library = Library(config_dir)
    shared: list[str] = []
    dimensions: list[Dimension] = []
    violations: list[Violation] = []
    for text in overrides:
        if (override := parsed(text)) is None:
            shared.append(text)
            continue
        key = override.get_key_element().lstrip("+")
        if key in _OWN:
            message = "is set by the sweep for each trial"
            violations.append(Violation(key, text.partition("=")[2], COMMAND_LINE, message))
        elif not override.is_sweep_override():
            shared.append(text)
        else:
            dimension = _dimension(override, key, text, library)
            (dimensions if isinstance(dimension, Dimension) else violations).append(dimension)  # type: ignore[arg-type]
    violations += given_twice([one.key for one in dimensions])
    if not dimensions and not violations:
        message = "no key has several values, as in optimizer.lr=1e-3,3e-4"
        line = shlex.join(["nanoscale", "train", *overrides])
        violations.append(Violation("", None, COMMAND_LINE, message, (line,)))
    if violations:
        refuse(violations)
    return Space(tuple(shared), tuple(dimensions))


def _dimension(override: Override, key: str, text: str, library: Library) -> Dimension | Violation:
    raw, value = text.partition("=")[2], override.value()
    if isinstance(value, IntervalSweep):
        return _interval(key, raw, value)
    if isinstance(value, Glob):
        values = [
            name
            for name in (library.options(key) if key in library.groups() else ())
            if any(fnmatchcase(name, pattern) for pattern in value.include)
            and not any(fnmatchcase(name, pattern) for pattern in value.exclude)
        ]
        if not values:
            return Violation(key, raw, COMMAND_LINE, "matches no option of a group")
    elif isinstance(value, (ChoiceSweep, RangeSweep)):
        values = _texts(override, raw)
    else:
        return Violation(key, raw, COMMAND_LINE, "has values of an unknown kind")
    return values_problem(key, raw, values) or Dimension(key, tuple(values))


def _interval(key: str, raw: str, value: IntervalSweep) -> Dimension | Violation:
    if value.start is None or value.end is None or not value.start < value.end:
        message = "is an interval whose first number is not below the second"
        return Violation(key, raw, COMMAND_LINE, message)
    logarithmic = "log" in value.tags
    if logarithmic and value.start <= 0:
        message = "is a logarithmic interval, which begins above 0"
        return Violation(key, raw, COMMAND_LINE, message)
    declared = reference.declared().get(key)  # in Hydra's grammar an interval is of floats
    kinds = reference.alternatives(declared.annotation) if declared is not None else ()
    integer = int in kinds and float not in kinds
    return Dimension(
        key, interval=Interval(float(value.start), float(value.end), logarithmic, integer)
    )


def _texts(override: Override, raw: str) -> list[str]:
    """Return the values as they are typed, as in `1e-3,3e-4`, where no quotes or brackets make that unclear."""
    values = [_shorter(text) for text in override.sweep_string_iterator()]
    typed = [text.strip() for text in raw.split(",")]
    plain = not any(sign in raw for sign in "()[]{}'\"\\")
    return typed if plain and len(typed) == len(values) else values


def _shorter(text: str) -> str:
    """Return 0.3 for 0.30000000000000004, as a range of decimal steps has it."""
    try:
        number = float(text)
    except ValueError:
        return text
    rounded = f"{number:.12g}"
    return rounded if len(rounded) < len(text) and "." in text else text


def _short_names(keys: Sequence[str]) -> dict[str, str]:
    """Return the last words of each key that no other key ends with."""
    short = {}
    for key in keys:
        parts = key.split(".")
        for count in range(1, len(parts) + 1):
            name = ".".join(parts[-count:])
            if sum(other == name or other.endswith(f".{name}") for other in keys) == 1:
                break
        short[key] = name
    return short
