"""A composed configuration, with the provenance of every value."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nanoscale.config.schema import Config
from nanoscale.config.values.provenance import (
    COMMAND_LINE,
    DEFAULT,
    History,
)

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Composed:
    """A configuration as requested; `auto` and null values are not resolved yet."""

    config: Config
    history: History
    """Dotted key → its writers in order, from the schema's default to the effective one."""
    recipe: str | None
    """The name from which the run's name is built."""
    words: tuple[str, ...]
    unasked: frozenset[str] = frozenset({DEFAULT})
    """Sources that nobody chose for this job: defaults, default options of groups, a frozen file."""
    typed: Mapping[str, str] = field(default_factory=dict)
    """Key → the text of its value on the command line."""

    def source(self, key: str) -> str:
        """Return the source that set a key last."""
        settings = self.history.get(key)
        return settings[-1].source if settings else DEFAULT

    def by_hand(self, key: str) -> bool:
        """True if the command line set a key."""
        return self.source(key).startswith(COMMAND_LINE)

    def as_typed(self, key: str) -> str:
        """Return the text of a key on the command line; empty if it was not set, or referred to a key."""
        text = self.typed.get(key, "") if self.source(key) == COMMAND_LINE else ""
        return "" if "${" in text else text

    def by_hand_around(self, key: str) -> bool:
        """True if the command line set a key, anything in it, or a section or mapping that contains it."""
        around = key.split(".")
        names = [".".join(around[:end]) for end in range(2, len(around) + 1)]
        names += [name for name in self.history if name.startswith(f"{key}.")]
        return any(map(self.by_hand, names))

    def asked_for(self, key: str) -> bool:
        """True if the command line or a recipe set a key, or chose the option that did."""
        file = re.sub(r":[0-9]+$", "", self.source(key))
        return file not in self.unasked
