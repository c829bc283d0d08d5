"""What every command shares: one JSON document on standard output, errors on standard error."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanoscale.common import display
from nanoscale.common.errors import UserError, Violation

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

DONE, FAILED, WRONG_REQUEST, DOES_NOT_FIT, INTERRUPTED = 0, 1, 2, 3, 130

AsJson = Annotated[
    bool, typer.Option("--json", help="One JSON document on standard output, nothing else.")
]


def print_json(document: Any) -> None:
    """Write the one JSON document of a command; what a terminal would obey is escaped as JSON has it."""
    ascii_only = not display.has_utf8(sys.stdout)
    text = json.dumps(document, indent=2, ensure_ascii=ascii_only)
    display.show(re.sub(r"[^\n -~]", _escaped, text))


def _escaped(match: re.Match[str]) -> str:
    char = match[0]
    return char if display.clean(char) == char else json.dumps(char)[1:-1]


def console(*, error: bool = False) -> Console:
    """Where human output goes."""
    return display.console(sys.stderr if error else sys.stdout)


def show_error(error: UserError, *, as_json: bool) -> None:
    """Say what is wrong, where it was set and what to type instead; as JSON too if asked for."""
    if as_json:
        with display.surviving(sys.stdout):
            print_json({"error": error_document(error)})
    with display.surviving(sys.stderr):
        console(error=True).print(error_text(error), end="")


def exit_code(error: UserError) -> int:
    """Return the exit code of a command that ends with this error."""
    from nanoscale.runs.lock import TakenOverError

    if error.kind == "plan":
        return DOES_NOT_FIT
    return FAILED if isinstance(error, TakenOverError) else WRONG_REQUEST


def error_document(error: UserError) -> dict[str, Any]:
    """`kind`, `message` and every violation with its key, value, source and suggestions."""
    violations = [
        {
            "key": violation.key,
            "value": _as_json(violation.value),
            "source": violation.source,
            "message": violation.message,
            "suggestions": list(violation.suggestions),
            **({"remedy": violation.remedy} if violation.remedy else {}),
        }
        for violation in error.violations
    ]
    return {"kind": error.kind, "message": error.message, "violations": violations}


def _as_json(value: object) -> object:
    """JSON has no infinity and no NaN."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def error_text(error: UserError) -> Text:
    """The error as lines; several violations as a list."""
    from rich.text import Text

    text = Text()
    text.append("error: ", style="bold red")
    violations = error.violations
    if len(violations) == 1 and violations[0].message in error.message:
        text.append(f"{error.message}\n")
        _append_details(text, violations[0], "  ")
        return text
    text.append(f"{error.message}{':' if violations else ''}\n")
    for violation in violations:
        text.append("  • ", style="red")
        _append_sentence(text, violation)
        _append_details(text, violation, "    ")
    return text


def _append_sentence(text: Text, violation: Violation) -> None:
    from nanoscale.config.violations import subject

    text.append(subject(violation), style="bold")
    text.append(f": {violation.message}\n")


def _append_details(text: Text, violation: Violation, indent: str) -> None:
    """Where it was set, and what to type instead."""
    if violation.key and violation.source:
        text.append(f"{indent}from: ", style="dim")
        text.append(f"{violation.source}\n")
    if violation.suggestions:
        text.append(f"{indent}type instead: ", style="dim")
        for index, suggestion in enumerate(violation.suggestions):
            text.append(" or ", style="dim") if index else None
            text.append(suggestion, style="green")
        text.append("\n")
    if violation.remedy:
        text.append(f"{indent}remedy: ", style="dim")
        text.append(f"{violation.remedy}\n")


@contextmanager
def saying() -> Iterator[Callable[[str], None]]:
    """For what is being done at the moment, where somebody is looking: the last line of what it is told."""
    screen = console(error=True)
    if not screen.is_terminal:
        yield lambda _: None
        return
    from rich.text import Text

    with screen.status("") as status:
        yield lambda text: status.update(Text(text.strip().rpartition("\n")[2]))
