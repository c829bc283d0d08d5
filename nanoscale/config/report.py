"""Gathering what is wrong into the one error that a user sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from nanoscale.errors import UserError, Violation


def refuse(violations: Sequence[Violation], kind: str = "config") -> NoReturn:
    """Raise the UserError that carries all of them."""
    if len(violations) == 1:
        raise UserError(kind, sentence(violations[0]), list(violations)) from None
    raise UserError(kind, f"{len(violations)} things are wrong", list(violations)) from None


def sentence(violation: Violation) -> str:
    """The violation in one line, without what to type instead."""
    return f"{subject(violation)}: {violation.message}"


def subject(violation: Violation) -> str:
    """What is wrong: `key=value`, or the file."""
    if not violation.key:
        return violation.source
    value = violation.value
    nested = isinstance(value, list) and any(isinstance(entry, (dict, list)) for entry in value)
    if value is None or isinstance(value, dict) or nested:
        return violation.key
    return f"{violation.key}={shown(value)}"


def shown(value: object) -> str:
    """A value as it is written in YAML or in an override."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return "[" + ",".join(shown(entry) for entry in value) + "]"
    return str(value)


def override(key: str, value: object) -> str:
    """The word that sets a key, ready to paste into a shell: to some, brackets are a pattern."""
    word = f"{key}={shown(value)}"
    return f"'{word}'" if isinstance(value, list) else word
