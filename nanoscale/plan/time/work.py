"""The time of a micro batch's passes through parts of the model, by purpose."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds of one pass of one micro batch on a rank, by purpose."""

    matmul: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    launch: float = 0.0
    """Seconds in which the device waits for the CPU."""
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0

    @property
    def total(self) -> float:
        computed = self.matmul + self.attention + self.elementwise + self.launch
        return computed + self.tp + self.cp + self.ep


NOTHING = Work()


def together(*works: Work) -> Work:
    """Return the sum of works."""
    return Work(*(sum(getattr(work, name) for work in works) for name in _WORK))


_WORK = tuple(field.name for field in fields(Work))


@dataclass(frozen=True, slots=True)
class Passes:
    """The passes through a part of the model."""

    forward: Work
    backward: Work
    recomputed: Work
    recomputed_flops: float
    """FLOPs of recomputed products, per micro batch and rank."""
    both: Work
    """Forward and backward."""
    seconds: tuple[float, float, float]
    """The totals of the first three, which a search reads often."""


def passes(forward: Work, backward: Work, recomputed: Work = NOTHING, flops: float = 0.0) -> Passes:
    seconds = forward.total, backward.total, recomputed.total
    return Passes(forward, backward, recomputed, flops, together(forward, backward), seconds)
