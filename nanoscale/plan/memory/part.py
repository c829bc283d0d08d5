"""One figure of a plan and where it comes from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """A named number of bytes. `why` writes its arithmetic down, and is called only where someone asks."""

    name: str
    bytes: int
    why: Callable[[], str]

    @property
    def how(self) -> str:
        """The formula as symbols and numbers, with its source."""
        return self.why()
