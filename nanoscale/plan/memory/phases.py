"""The events of a step in which memory may peak, and the fold over them that gives the allocated bytes."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from nanoscale.plan.memory.block_shape import Sizes


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


PARTS = {
    "weights": "weights",
    "compute_copies": "compute copies",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "gathered": "units in flight",
    "activations": "activations",
    "logits": "logits and loss",
    "communication": "communication buffers",
}
"""The parts of a rank's memory, and the names that a plan shows."""


class MemoryEvent:
    """An event of a step in which memory may peak.

    Args:
        name: the name of the phase that a plan shows.
        levels: the new sizes of the parts that changed since the last event.
        pooled: bytes, counted in the parts, that are allocated on the streams of gathers and reductions.
        during: bytes that are added while the event lasts; negative if they are free.
    """

    def __init__(
        self, name: str, levels: Sizes | None = None, /, *, pooled: int = 0, **during: int
    ) -> None:
        self.name, self.levels, self.pooled, self.during = name, levels or {}, pooled, during


@dataclass(frozen=True, slots=True)
class Phase:
    """The bytes that a rank has allocated at the peak of an event."""

    name: str
    levels: Sizes
    during: Sizes
    pooled: int
    """See `MemoryEvent` on these three; `levels` has all parts."""
    allocated: int
    """The sum of all parts."""

    @property
    def parts(self) -> Sizes:
        """Bytes of each part, by the name that a plan shows."""
        return {name: self.levels[part] + self.during.get(part, 0) for part, name in PARTS.items()}


def phases_of(levels: Sizes, events: Iterable[MemoryEvent]) -> tuple[Phase, ...]:
    """Return the phases of events in their order, from the sizes of the parts before the first event."""
    phases, levels = [], dict.fromkeys(PARTS, 0) | levels
    for it in events:
        levels = levels | it.levels
        allocated = sum(levels.values()) + sum(it.during.values())
        phases.append(Phase(it.name, levels, it.during, it.pooled, allocated))
    return tuple(phases)


@dataclass(frozen=True, slots=True)
class RankPhases:
    """The phases of a pipeline rank's step."""

    phases: tuple[Phase, ...]
    pools: int
    """The most bytes that the streams of gathers and reductions need in a step."""
    host: tuple[tuple[str, int], ...]
    explain: Callable[[str, Phase], str]
    """Return the formula of a named part in a phase."""
