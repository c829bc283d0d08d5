"""The sources that a configuration draws tokens from: one, or several in fixed shares."""

from __future__ import annotations

from dataclasses import dataclass

from nanoscale.config.schema import Data


@dataclass(frozen=True)
class Source:
    """One source of `data.mixture`, or the only one."""

    path: str | None
    weight: float | None = None
    """its part of the samples beside those of the others; None: by its size, as that of all others"""
    valid_path: str | None = None
    name: str = ""
    """empty where it is the only one"""

    @property
    def key(self) -> str:
        """The section of the configuration that it stands in."""
        return f"data.mixture.{self.name}" if self.name else "data"


MEMBERS = ("path", "weight", "valid_path")
"""the keys of a source in `data.mixture`"""


def sources_of(data: Data) -> list[Source]:
    """Of a configuration that the rules have seen; those of weight 0 are left out."""
    if not data.mixture:
        return [Source(data.path, None, data.valid_path)]
    sources = [Source(**entry, name=name) for name, entry in data.mixture.items()]
    return [source for source in sources if source.weight != 0]
