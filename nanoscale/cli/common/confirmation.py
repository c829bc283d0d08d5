"""Questions to the user before something that cannot be undone, or may not be wanted."""

from __future__ import annotations

import sys

from nanoscale.common import display


def can_ask() -> bool:
    """True if somebody sees a question and can answer it."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def is_confirmed(question: str) -> bool:
    """Ask on the terminal, and return True if the answer is yes."""
    display.note(f"{question} [y/N] ", end="")
    return sys.stdin.readline().strip().lower() in ("y", "yes")
