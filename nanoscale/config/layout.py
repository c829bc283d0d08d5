"""Which rank stands where: tp varies fastest, then cp, then dp, then pp."""

from __future__ import annotations

from dataclasses import dataclass

from nanoscale.config.schema import Config, Parallel

GRADIENT_BUCKET = 25 << 20
"""bytes of gradients that replicas send together, as DistributedDataParallel does"""


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


def is_replicated(config: Config) -> bool:
    """Whether ranks of the native backend each train the whole model as it is, and differ in tokens alone.

    Nothing is sharded then, divided or cast, and FSDP2 has nothing to do; see `parallel.replicas`.
    """
    layout, precision = config.parallel, config.precision
    assert isinstance(layout.dp, int), "the launcher freezes a number"
    whole = config.zero.stage == 0 and layout.tp == layout.pp == layout.ep == 1
    alike = precision.params == precision.compute == precision.reduce
    return whole and alike and layout.dp * layout.cp > 1
