"""Replacements of attributes of other modules that are undone in reverse order."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

_ABSENT = object()


class Patches(ExitStack):
    """Replacements that last until the `with` block ends."""

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of a module or class."""
        self.callback(_restore, owner, name, vars(owner).get(name, _ABSENT))
        setattr(owner, name, value)

    def replace_item(self, owner: Any, key: Any, value: Any) -> None:
        """Set an item of a dictionary."""
        self.callback(_restore_item, owner, key, owner.get(key, _ABSENT))
        owner[key] = value

    def wrap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace a function by `make(function)`."""
        self.replace(owner, name, make(getattr(owner, name)))


def _restore(owner: Any, name: str, value: Any) -> None:
    if value is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


def _restore_item(owner: Any, key: Any, value: Any) -> None:
    if value is _ABSENT:
        del owner[key]
    else:
        owner[key] = value
