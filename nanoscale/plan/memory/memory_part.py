"""One figure of a plan and its source."""

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
