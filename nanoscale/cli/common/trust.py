"""Confirmation before a run folder of another user names code or programs that would be executed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoscale.common import display
from nanoscale.common.errors import UserError, Violation
from nanoscale.config.reference import meaning
from nanoscale.config.violations import subject


def can_ask() -> bool:
    """True if somebody sees a question and can answer it."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def is_confirmed(question: str) -> bool:
    """Ask on the terminal, and return True if the answer is yes."""
    display.note(f"{question} [y/N] ", end="")
    return sys.stdin.readline().strip().lower() in ("y", "yes")


if TYPE_CHECKING:
    from nanoscale.config.schema import Config
    from nanoscale.config.values.provenance import Composed


def require_trust(
    file: Path, compose: Callable[[], Composed], *, trust: bool, launched: bool
) -> None:
    """Ask before a frozen configuration that this user's own runs did not make names code or programs.

    Values that the command line replaces need no confirmation.

    Args:
        file: config.yaml of a run.
        compose: returns it with the command line's changes.
        launched: False if the job is only planned or rehearsed.

    Raises:
        UserError: nobody can be asked, or the answer is no.
    """
    from nanoscale.config.composing.frozen import load
    from nanoscale.runs.trust import executed, is_signed

    try:
        config: Config = load(file)
    except UserError:  # it is not a configuration of a run, and may choose groups like a recipe
        config = compose().config
    values = executed(config, launched=launched)
    if trust or not values or is_signed(file.absolute().parent, executed(config)):
        return
    ask(file, list(_violations(values, compose(), file)))


def ask(file: Path, found: list[Violation]) -> None:
    """Ask whether code and programs that a file names may run. Raises a UserError if not."""
    if not found:
        return
    what = f"{file} names code or programs to run, and was not made by your own runs, or was changed since"
    if not can_ask():
        raise UserError("trust", f"{what}; if you trust whoever made it, add --trust", found)
    display.note(f"{what}:")
    for one in found:
        display.note(f"  {subject(one)}  ({one.message})")
    if not is_confirmed("Do you trust whoever made it?"):
        raise UserError("trust", "nothing was started; --trust answers yes")


def _violations(values: dict[str, Any], composed: Composed, file: Path) -> Iterator[Violation]:
    """Yield each value that the file sets and the command line does not replace."""
    for key, value in values.items():
        later = _later(composed, key, file)
        entries = {key: value}
        if isinstance(value, dict):
            replaced = {name for setting in later for name in setting or ()}
            entries = {f"{key}.{name}": it for name, it in value.items() if name not in replaced}
        elif later:
            entries = {}
        for name, entry in entries.items():
            yield Violation(name, entry, str(file), meaning(key))


def _later(composed: Composed, key: str, file: Path) -> list[Any]:
    """Return the values that were set after the file's."""
    settings = composed.history.get(key, [])
    sources = [Path(one.source.rpartition(":")[0]).absolute() for one in settings]
    own = [n for n, source in enumerate(sources) if source == file.absolute()]
    return [one.value for one in settings[own[-1] + 1 :]] if own else []
