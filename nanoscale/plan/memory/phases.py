"""The phases of a step in which memory may peak, and their allocated bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """A part of a rank's memory, with its size and an explanation."""

    name: str
    bytes: int
    why: Callable[[], str]
    """Return the formula as symbols and numbers, with its source."""

    @property
    def how(self) -> str:
        return self.why()


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of a step, with the bytes that a rank has allocated at the phase's peak."""

    name: str
    weights: int
    optimizer: int
    compute_copies: int = 0
    gradients: int = 0
    gathered: int = 0
    """Temporarily gathered parameters."""
    activations: int = 0
    logits: int = 0
    communication: int = 0
    pooled: int = 0
    """Bytes, counted in the fields above, that are allocated on the streams of gathers and reductions."""
    fragmented: int = 0
    """Bytes of freed blocks that are too small for the next allocation."""

    @property
    def allocated(self) -> int:
        """The sum of all parts, in bytes."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, int]:
        """The bytes of each part, by the name that a plan shows."""
        return {
            "weights": self.weights,
            "compute copies": self.compute_copies,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "units in flight": self.gathered,
            "activations": self.activations,
            "logits and loss": self.logits,
            "communication buffers": self.communication,
        }


@dataclass(frozen=True, slots=True)
class RankPhases:
    """The phases of a pipeline rank's step."""

    phases: tuple[Phase, ...]
    pools: int
    """The most bytes that the streams of gathers and reductions need in a step."""
    host: tuple[tuple[str, int], ...]
    explain: Callable[[str, Phase], str]
    """Return the formula of a named part in a phase."""
