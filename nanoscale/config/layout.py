"""Which rank stands where: tp varies fastest, then cp, then dp, then pp."""

from __future__ import annotations

from dataclasses import dataclass

from nanoscale.config.schema import Parallel


@dataclass(frozen=True)
class Coordinates:
    """A rank's place in the layout."""

    pp: int
    dp: int
    cp: int
    tp: int


def coordinates(rank: int, parallel: Parallel) -> Coordinates:
    """The place of a global rank; `parallel.dp` must be resolved."""
    assert isinstance(parallel.dp, int)
    rest, tp = divmod(rank, parallel.tp)
    rest, cp = divmod(rest, parallel.cp)
    pp, dp = divmod(rest, parallel.dp)
    return Coordinates(pp, dp, cp, tp)
