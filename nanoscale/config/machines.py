"""A host of a job and the devices that the job uses there."""

from __future__ import annotations

from collections.abc import Sequence
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
    def used_devices(self) -> Sequence[int]:
        """The device of each slot, by the host's numbers."""
        return range(self.slots) if self.devices is None else self.devices

    def entry(self, devices: Sequence[int]) -> str:
        """Return the entry of `--include` for some of its devices."""
        name = hostnames.in_filter(self.name)
        if self.devices is None and len(devices) == self.slots:
            return name
        return f"{name}:{','.join(map(str, devices))}"

    @property
    def address(self) -> str:
        """The name without `user@` and without the brackets of IPv6."""
        return hostnames.address(self.name)
