"""A host of a job and the devices that the job uses there."""

from __future__ import annotations

from dataclasses import dataclass

from nanoscale.config import hostnames


@dataclass(frozen=True)
class Host:
    """One host of a job."""

    name: str
    """The name in the hostfile: it may be `user@host`, or an IPv6 address."""
    slots: int
    """Ranks to start there."""
    devices: tuple[int, ...] | None = None
    """The devices that they use, if a filter selected some; None: the first ones."""
    source: str = ""
    """The line that defines it, such as `hosts:3`."""

    @property
    def address(self) -> str:
        """The name without `user@` and without the brackets of IPv6."""
        return hostnames.address(self.name)
