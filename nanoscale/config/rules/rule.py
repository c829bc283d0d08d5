"""A rule as the row of a table: the key, the condition, the sentence and the advice."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from nanoscale.config import reference
from nanoscale.config.reference import value_of
from nanoscale.config.schema import Config
from nanoscale.config.violations import override, shown

Where = Mapping[str, Any]
"""Values of keys that hold together: for each key a value, a tuple of values, or a test of the value."""

Near = Callable[[Config], Iterable[str | None]]
"""A function that returns overrides to paste, if they depend on the configuration."""


@dataclass(frozen=True, eq=False)
class Rule:
    """A rule: `check` refuses with it, and the search of layouts enumerates with it.

    Its functions get a configuration with the model, the precision and `parallel.dp` resolved.
    """

    key: str
    """The key that a violation names."""
    reads: tuple[str, ...]
    """Every key that `holds` depends on."""
    holds: Callable[[Config], bool]
    message: str | Callable[[Config], str]
    """The sentence that follows the key and its value; `{c}` in a text is the configuration."""
    advice: Sequence[str | Near] | Near
    """Overrides to paste, with `{c}` as in a message. A key alone stands for its nearest legal values,
    `KEY<` for the nearest one below."""
    kind: str = "layout"
    """The kind of the error."""
    supported: str = ""
    """For the limit of a backend: the values that it supports, for the table of backends."""


def refused(
    key: str, where: Where, message: str | Callable[[Config], str], *advice: str | Near,
    supported: str = "",
) -> Rule:  # fmt: skip
    """Return the rule that values do not hold together."""
    match = matches(where)
    reads, holds = tuple(where), lambda config: not match(config)
    return Rule(key, reads, holds, message, advice, supported=supported)


def of_kind(kind: str, *rules: Rule) -> tuple[Rule, ...]:
    """Return the rules with this kind of error."""
    return tuple(replace(rule, kind=kind) for rule in rules)


def only_with(key: str, where: Where, *instead: str) -> Rule:
    """Return the rule that a key keeps its default where it has no meaning: nothing is ignored silently.

    Args:
        where: the values with which the key has a meaning.
        instead: further advice.
    """
    usual, concerns = reference.declared()[key].default, matches(where)
    tests = {name: _accepts(value) for name, value in where.items()}

    def message(config: Config) -> str:
        values = {name: value_of(config, name) for name in where}
        others = [f"{name}={shown(it)}" for name, it in values.items() if not tests[name](it)]
        return ignored(" and ".join(others))

    value = attrgetter(key)
    return Rule(key, (key, *where),
        lambda config: value(config) == usual or concerns(config),
        message, (*instead, reset(key)))  # fmt: skip


def ignored(choice: str) -> str:
    """Return the sentence on a key that has no meaning with another setting."""
    return f"does not concern {choice} and would be ignored: leave it out"


def reset(key: str) -> str:
    """Return the override that gives a key its default."""
    usual = reference.declared()[key].default
    return f"~{key}" if isinstance(usual, dict) else override(key, usual)


def matches(where: Where) -> Callable[[Config], bool]:
    """Return the test of a configuration for these values."""
    tests = [(attrgetter(key), _accepts(value)) for key, value in where.items()]

    def match(config: Config) -> bool:
        for value, accepts in tests:  # noqa: SIM110 - faster than all(), and the search calls it often
            if not accepts(value(config)):
                return False
        return True

    return match


def _accepts(value: Any) -> Callable[[Any], bool]:
    if callable(value):
        return value  # type: ignore[no-any-return]
    return (value if isinstance(value, tuple) else (value,)).__contains__


def several(value: int) -> bool:
    return value > 1


def other_than(*values: Any) -> Callable[[Any], bool]:
    """Return the test that a value is none of these."""
    return lambda value: value not in values


def data_parallel(config: Config) -> int:
    """Return the data-parallel degree: the least, until the devices are known."""
    dp = config.parallel.dp
    return dp if isinstance(dp, int) else config.parallel.dp_replicate
