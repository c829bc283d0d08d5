"""What passes of a micro batch through parts of the model take, by what the time is spent on."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds of one pass of one micro batch on a rank, by what they are spent on."""

    matmul: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    launch: float = 0.0
    """in which the device waits for the CPU"""
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0

    @property
    def total(self) -> float:
        computed = self.matmul + self.attention + self.elementwise + self.launch
        return computed + self.tp + self.cp + self.ep


NOTHING = Work()


def together(*works: Work) -> Work:
    """Their sum."""
    return Work(*(sum(getattr(work, name) for work in works) for name in _WORK))


_WORK = tuple(field.name for field in fields(Work))


@dataclass(frozen=True, slots=True)
class Passes:
    """The passes through a part of the model."""

    forward: Work
    backward: Work
    recomputed: Work
    recomputed_flops: float
    """of products that are computed again, a micro batch and rank"""
    both: Work
    """forward and backward"""
    seconds: tuple[float, float, float]
    """the totals of the first three, which a search asks for often"""


def passes(forward: Work, backward: Work, recomputed: Work = NOTHING, flops: float = 0.0) -> Passes:
    seconds = forward.total, backward.total, recomputed.total
    return Passes(forward, backward, recomputed, flops, together(forward, backward), seconds)
