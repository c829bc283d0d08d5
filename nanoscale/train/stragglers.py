"""Ranks and hosts that arrive late at the collectives of every step, from each rank's time without waiting."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from nanoscale.common.units import duration, listed

_RECORDS, _LAST = 20, 16
"""The logged steps that are looked at, and in how many of them a rank must be the last of its peers."""
_LEAST, _LEAST_S = 0.02, 0.002
"""The least that a late rank is behind the others: this share of their own time in a step, and seconds."""


@dataclass
class Stragglers:
    """The detection of ranks, or hosts, that are the last of their peers in nearly every logged step."""

    stages: Sequence[Sequence[int]]
    """The ranks of each stage of the pipeline, which do the same work."""
    hosts: Sequence[str]
    """The host of each rank."""
    _records: deque[tuple[int, list[float]]] = field(default_factory=lambda: deque(maxlen=_RECORDS))
    _named: set[str] = field(default_factory=set)

    def add(self, step: int, seconds: list[float]) -> str | None:
        """Take the seconds of a step for which each rank did not wait; return a sentence about late ranks."""
        self._records.append((step, seconds))
        if len(self._records) < _RECORDS:
            return None
        late: dict[str, float] = {}
        for ranks in self.stages:
            by_host: dict[str, list[int]] = {}
            for rank in ranks:
                by_host.setdefault(self.hosts[rank], []).append(rank)
            is_spread = max(map(len, by_host.values())) > 1
            hosts = self._late(by_host) if is_spread else {}
            by_rank = {f"rank {it} on {self.hosts[it]}": [it] for it in ranks}
            late |= hosts or self._late(by_rank)
        new = late.keys() - self._named
        self._named |= new
        if not new:
            return None
        verb = "arrives" if len(late) == 1 else "arrive"
        return (
            f"{listed(sorted(late))} {verb} {duration(max(late.values()))} late in every step since step "
            f"{self._records[0][0]}, and the others wait"
        )

    def _late(self, groups: Mapping[str, Sequence[int]]) -> dict[str, float]:
        """Return the group whose first rank is later than the first ranks of all others, and the seconds behind
        their median."""
        if len(groups) < 2:
            return {}
        firsts = [
            {name: min(seconds[rank] for rank in ranks) for name, ranks in groups.items()}
            for _, seconds in self._records
        ]
        lasts = [max(one, key=one.__getitem__) for one in firsts]
        last = max(groups, key=lasts.count)
        if lasts.count(last) < _LAST:
            return {}
        behind = median(one.pop(last) - median(one.values()) for one in firsts)
        least = max(_LEAST_S, _LEAST * median(median(one.values()) for one in firsts))
        return {last: behind} if behind > least else {}
