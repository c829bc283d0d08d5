"""The moments of a step at which memory may peak, and the bytes that each of them holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """A named number of bytes. `why` writes its arithmetic down, and is called only on request."""

    name: str
    bytes: int
    why: Callable[[], str]

    @property
    def how(self) -> str:
        """Return the formula as symbols and numbers, with its source."""
        return self.why()


@dataclass(frozen=True, slots=True)
class Phase:
    """A moment of a step, with the bytes that a rank holds then."""

    name: str
    weights: int
    optimizer: int
    compute_copies: int = 0
    gradients: int = 0
    gathered: int = 0
    """Parameters that are gathered for a while."""
    activations: int = 0
    logits: int = 0
    communication: int = 0
    pooled: int = 0
    """Bytes of the above that are allocated on the streams of gathers and reductions."""
    fragmented: int = 0
    """Bytes freed between tensors that are still held, too small for the next allocation."""

    @property
    def allocated(self) -> int:
        """The sum of all parts, in bytes."""
        return (
            self.weights
            + self.compute_copies
            + self.gradients
            + self.optimizer
            + self.gathered
            + self.activations
            + self.logits
            + self.communication
        )

    @property
    def parts(self) -> dict[str, int]:
        """The bytes of each part, under the name that a plan shows."""
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
    """Return the arithmetic of a part in a phase."""
