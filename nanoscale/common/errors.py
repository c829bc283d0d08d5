"""Errors that the user can fix: shown as a whole, exit code 2, no traceback."""

import os
import pwd
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NoReturn


@dataclass(frozen=True)
class Violation:
    """One problem of a request."""

    key: str
    """The configuration key, option or file that is wrong; "" if there is none."""
    value: object
    """The value that was set."""
    source: str
    """The source of that value: `recipes/mine.yaml:12`, `command line`, `default`."""
    message: str
    """The broken rule, as a sentence without the key."""
    suggestions: tuple[str, ...] = ()
    """Replacements to type, each ready to paste."""
    remedy: str = ""
    """The remedy, if it is more than a replacement to type."""
    typed: str = ""
    """The value as it was typed, if that text differs from the value's own."""


@dataclass
class UserError(Exception):
    """The request is wrong; nothing was started or written."""

    kind: str
    """`config`, `usage`, `layout`, `data`, `run`, `checkpoint`, or `plan` if it does not fit."""
    message: str
    violations: list[Violation] = field(default_factory=list)

    def __str__(self) -> str:
        return self.message


def refuse_option(option: str, value: object, message: str, *advice: str) -> NoReturn:
    """Refuse the value of an option or argument; None stands for one that is missing.

    Raises:
        UserError: of kind `usage`, with what to type instead.
    """
    violation = Violation(option, value, "command line", message, advice)
    shown = option if value is None else f"{option} {value}"
    raise UserError("usage", f"{shown}: {message}", [violation])


def reason(error: OSError) -> str:
    """Return why a file cannot be used; if its permissions are the reason, for which user."""
    text = error.strerror or str(error)
    return f"{text} for the user {user_name()}" if isinstance(error, PermissionError) else text


def user_name() -> str:
    """Return the name of the user of this process, or the number if it has no name."""
    with suppress(KeyError):
        return pwd.getpwuid(os.geteuid()).pw_name
    return str(os.geteuid())


class LostPeerError(ConnectionError):
    """A failure of another rank, whose own report says why."""
