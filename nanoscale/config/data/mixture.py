"""The sources of a configuration's tokens: one, or several in fixed shares (a data mixture)."""

from __future__ import annotations

from dataclasses import dataclass

from nanoscale.config.schema import Data


@dataclass(frozen=True)
class MixtureSource:
    """One source of `data.mixture`, or the only one."""

    path: str | None
    weight: float | None = None
    """Its weight among the sources; None: by its size, as for all others."""
    valid_path: str | None = None
    name: str = ""
    """Empty if it is the only source."""

    @property
    def key(self) -> str:
        """The section of the configuration that holds it."""
        return f"data.mixture.{self.name}" if self.name else "data"


MEMBERS = ("path", "weight", "valid_path")
"""The keys of a source in `data.mixture`."""


def sources_of(data: Data) -> list[MixtureSource]:
    """List the sources of a configuration that the rules have checked; those of weight 0 are left out."""
    if not data.mixture:
        return [MixtureSource(data.path, None, data.valid_path)]
    sources = [MixtureSource(**entry, name=name) for name, entry in data.mixture.items()]
    return [source for source in sources if source.weight != 0]
