"""One figure of a plan and where it comes from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

GIB = 2**30


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


def mib(number: float) -> str:
    """Bytes for people, in MiB below a GiB."""
    return f"{number / GIB:.2f} GiB" if number >= GIB else f"{number / 2**20:.1f} MiB"


def share(needed: int, capacity: int) -> str:
    """`77.3 of 79.1 GiB`; in MiB where there is less than one GiB."""
    unit, name = (GIB, "GiB") if capacity >= GIB else (2**20, "MiB")
    return f"{needed / unit:.1f} of {capacity / unit:.1f} {name}"
