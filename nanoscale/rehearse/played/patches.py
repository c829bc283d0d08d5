"""Replacements of attributes of other modules that are undone in reverse order."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

Operation = Callable[..., Any]
"""A function of torch, or its replacement."""


class Patches(ExitStack):
    """Replacements that last until the `with` block ends."""

    def replace(self, owner: Any, name: str, value: Any) -> None:
        if name in vars(owner):
            self.callback(setattr, owner, name, vars(owner)[name])
        else:
            self.callback(delattr, owner, name)
        setattr(owner, name, value)

    def replace_item(self, owner: Any, key: Any, value: Any) -> None:
        if key in owner:
            self.callback(owner.__setitem__, key, owner[key])
        else:
            self.callback(owner.__delitem__, key)
        owner[key] = value

    def wrap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace a function by `make(function)`."""
        self.replace(owner, name, make(getattr(owner, name)))
