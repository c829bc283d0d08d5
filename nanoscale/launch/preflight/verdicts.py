"""The results of checks of hosts, and their combination for many hosts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_HOSTS_NAMED = 3
"""The most hosts that are named; more are counted."""
_HOST = "HOST"
"""The placeholder for each host's name in a text about several."""
_ADDRESS = re.compile(r"\S+(?= port \d+\b)")


@dataclass(frozen=True)
class Verdict:
    """The result of one check of one host."""

    host: str
    check: str
    good: bool
    text: str
    """The finding; `{}` is the place of the amount."""
    remedy: str = ""
    amount: float | None = None
    needed: bool = True
    """True if no job should start before it is good."""

    @property
    def finding(self) -> str:
        return _with_amounts(self.text, [self.amount])


@dataclass(frozen=True)
class EqualVerdicts:
    """Verdicts that are equal for several hosts."""

    verdicts: tuple[Verdict, ...]

    @property
    def check(self) -> str:
        return self.verdicts[0].check

    @property
    def good(self) -> bool:
        return self.verdicts[0].good

    @property
    def hosts(self) -> list[str]:
        return [verdict.host for verdict in self.verdicts]

    @property
    def finding(self) -> str:
        first = self.verdicts[0]
        text = first.text if len(self.verdicts) == 1 else _anonymous(first.text, first.host)
        return _with_amounts(text, [verdict.amount for verdict in self.verdicts])

    @property
    def remedy(self) -> str:
        first = self.verdicts[0]
        alone = len(self.verdicts) == 1
        return first.remedy if alone else _anonymous(first.remedy, first.host)


def grouped(verdicts: Iterable[Verdict]) -> list[EqualVerdicts]:
    """Group verdicts that differ only in the host, its name in their texts, and an amount."""
    groups: dict[tuple[str, bool, str, str], list[Verdict]] = {}
    for verdict in verdicts:
        text = _anonymous(verdict.text, verdict.host)
        remedy = "" if verdict.good else _anonymous(verdict.remedy, verdict.host)
        groups.setdefault((verdict.check, verdict.good, text, remedy), []).append(verdict)
    return [EqualVerdicts(tuple(group)) for group in groups.values()]


def join_names(hosts: Sequence[str]) -> str:
    """Join names: `n1`, `n1 and n2`, `n1, n2 and 14 more`."""
    if len(hosts) <= _HOSTS_NAMED:
        return " and ".join(filter(None, [", ".join(hosts[:-1]), *hosts[-1:]]))
    return f"{', '.join(hosts[: _HOSTS_NAMED - 1])} and {len(hosts) - _HOSTS_NAMED + 1} more"


def _anonymous(text: str, host: str) -> str:
    """Remove the host's name, and the address that ssh resolved for it."""
    text = _ADDRESS.sub(_HOST, text)
    if host not in text:
        return text
    return re.sub(rf"(?<![\w-]){re.escape(host)}(?![\w-])", _HOST, text)


def _with_amounts(text: str, amounts: Sequence[float | None]) -> str:
    values = [f"{amount:,.1f}" for amount in sorted(a for a in amounts if a is not None)]
    if not values:
        return text
    span = values[0] if values[0] == values[-1] else f"{values[0]} to {values[-1]}"
    return text.replace("{}", span)
