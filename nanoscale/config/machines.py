"""A host of a job and the devices that the job uses there."""

from __future__ import annotations

from dataclasses import dataclass

from nanoscale.config import hostnames


@dataclass(frozen=True)
class Host:
    """One host of a job."""

    name: str
    """as in the hostfile: it may be `user@host`, or an IPv6 address"""
    slots: int
    """ranks to start there"""
    devices: tuple[int, ...] | None = None
    """which of its devices they take, where a filter chose some; None: the first ones"""
    source: str = ""
    """where it stands, as in `hosts:3`"""

    @property
    def address(self) -> str:
        """The name without `user@` and without the brackets of IPv6."""
        return hostnames.address(self.name)
