"""The moments of a step at which memory may be highest, and what each of them holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

PARTS = (
    "weights",
    "compute copies",
    "gradients",
    "optimizer",
    "units in flight",
    "activations",
    "logits and loss",
    "communication buffers",
)


@dataclass(frozen=True, slots=True)
class Phase:
    """One moment."""

    name: str
    bytes: tuple[int, ...]
    """of every part in the order of PARTS"""
    pooled: int = 0
    """how many of them are allocated on the streams of gathers and reductions"""
    stranded: int = 0
    """bytes that have been freed in between of tensors still held, and are too small for what comes next"""


@dataclass(frozen=True, slots=True)
class RankPhases:
    """A pipeline rank's step."""

    phases: tuple[Phase, ...]
    pools: int
    """bytes that the streams of gathers and reductions once need, all told"""
    host: tuple[tuple[str, int], ...]
    explain: Callable[[str, Phase], str]
    """the arithmetic of a part in a phase"""
