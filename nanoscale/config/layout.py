"""The coordinates of ranks: tp varies fastest, then cp, then dp, then pp."""

from __future__ import annotations

from dataclasses import dataclass

from nanoscale.config.resolved import ResolvedConfig, ResolvedParallel

GRADIENT_BUCKET = 25 << 20
"""Bytes of gradients that replicas send together, as in DistributedDataParallel."""


@dataclass(frozen=True)
class Coordinates:
    """A rank's coordinates in the layout."""

    pp: int
    dp: int
    cp: int
    tp: int


def coordinates(rank: int, parallel: ResolvedParallel) -> Coordinates:
    """Return the coordinates of a global rank."""
    rest, tp = divmod(rank, parallel.tp)
    rest, cp = divmod(rest, parallel.cp)
    pp, dp = divmod(rest, parallel.dp)
    return Coordinates(pp, dp, cp, tp)


def is_replicated(config: ResolvedConfig) -> bool:
    """True if ranks of the native backend each train the whole, uncast model, and differ in tokens alone.

    Nothing is sharded, divided or cast then, and FSDP2 is not needed; see `parallel.ddp`.
    """
    layout, precision = config.parallel, config.precision
    whole = config.zero.stage == 0 and layout.tp == layout.pp == layout.ep == 1
    alike = precision.params == precision.compute == precision.reduce
    return whole and alike and layout.dp * layout.cp > 1
