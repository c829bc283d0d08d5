"""The output of commands: one JSON document on standard output, errors on standard error, and files."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, Any, NoReturn

from nanoscale.common import display
from nanoscale.common.credentials import without_credentials
from nanoscale.common.errors import UserError, Violation, refuse_option
from nanoscale.config.violations import subject
from nanoscale.runs.directory import write_atomically
from nanoscale.view.blocks import Report, page, show

if TYPE_CHECKING:
    from rich.text import Text


DONE, FAILED, WRONG_REQUEST, DOES_NOT_FIT, CHANGED, PREEMPTED, INTERRUPTED = 0, 1, 2, 3, 4, 75, 130


def print_json(document: Any) -> None:
    """Write the one JSON document of a command; control characters are escaped in JSON's form."""
    ascii_only = not display.has_utf8(sys.stdout)
    text = json.dumps(document, indent=2, ensure_ascii=ascii_only)
    display.show(re.sub(r"[^\n -~]", _escaped, text))


def answer(as_json: bool, document: Any, show: Callable[..., object], *shown: Any) -> None:
    """Print the JSON document of a command, or show its output to people.

    Args:
        shown: the arguments of `show`; none: the document.
    """
    if as_json:
        print_json(document)
    else:
        show(*(shown or (document,)))


def show_report(report: Report, file: Path | None = None) -> None:
    """Print a report to standard output, and name the file of its page if it has one."""
    show(display.console(), report)
    if file is not None:
        display.show(f"page  {file}")


def write_page(file: Path | None, report: Report, *, overwrite: bool) -> None:
    """Write a report to the page that --html names, if it names one. Errors as of `write_file`."""
    if file is not None:
        write_file("--html", file, page(report), overwrite=overwrite)


def print_yaml(text: str) -> None:
    """Print YAML, in color on a terminal and unchanged elsewhere."""
    if not sys.stdout.isatty():
        display.content(text)
        return
    from rich.syntax import Syntax

    display.console().print(Syntax(text, "yaml", background_color="default", word_wrap=True))


def _escaped(match: re.Match[str]) -> str:
    char = match[0]
    return char if display.clean(char) == char else json.dumps(char)[1:-1]


def show_error(error: UserError, *, as_json: bool) -> None:
    """Show an error: the problem, its source and the suggestions; as JSON too if requested."""
    if as_json:
        with display.survive_lost_stream(sys.stdout):
            print_json({"error": error_document(error)})
    with display.survive_lost_stream(sys.stderr):
        display.console(sys.stderr).print(error_text(error), end="")


def exit_code(error: UserError) -> int:
    """Return the exit code of a command that ends with this error."""
    from nanoscale.runs.lock import TakenOverError

    if error.kind == "plan":
        return DOES_NOT_FIT
    has_failed = error.kind == "rehearsal" or isinstance(error, TakenOverError)
    return FAILED if has_failed else WRONG_REQUEST


def exit_code_of_signal(first: Signals) -> int:
    """Return the exit code of a command that a signal has stopped: Ctrl-C is the user's own."""
    return INTERRUPTED if first is Signals.SIGINT else PREEMPTED


def refuse_name(name: str, message: str, *advice: str) -> NoReturn:
    """Refuse a name that nothing has: an argument of the command, in the form of an unknown key.

    Raises:
        UserError: of kind `config`, with what to type instead.
    """
    violation = Violation(name, None, "command line", message, advice)
    raise UserError("config", f"{name}: {message}", [violation])


def error_document(error: UserError) -> dict[str, Any]:
    """Return `kind`, `message` and every violation with its key, value, source and suggestions."""
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
    """Replace infinity and NaN, which JSON lacks, by their names; leave out credentials in addresses."""
    if isinstance(value, str):
        return without_credentials(value)
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def error_text(error: UserError) -> Text:
    """Return the error as lines; several violations as a list."""
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
        text.append(subject(violation), style="bold")
        text.append(f": {violation.message}\n")
        _append_details(text, violation, "    ")
    return text


def _append_details(text: Text, violation: Violation, indent: str) -> None:
    """Append the source of a violation, and its suggestions."""
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
    """Provide a function that shows the current activity in the last line of a terminal."""
    screen = display.console(sys.stderr)
    if not screen.is_terminal:
        yield lambda _: None
        return
    from rich.text import Text

    with screen.status("") as status:
        yield lambda text: status.update(Text(text.strip().rpartition("\n")[2]))


def require_writable(
    option: str, file: Path | None, *, overwrite: bool, is_own: Callable[[Path], bool] | None = None
) -> None:
    """Refuse a file that exists already or cannot be written, before anything is computed.

    Args:
        file: None if the option is not given.
        is_own: returns True for a file that this command wrote itself, which it may replace.

    Raises:
        UserError: the file exists, is a folder, or its folder is not writable.
    """
    if file is None:
        return
    if file.is_dir() or not file.parent.is_dir():
        raise UserError("usage", f"{file} cannot be written: name a file in a folder that exists")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise UserError("usage", f"{file} cannot be written: no permission")
    if overwrite or not file.is_file() or (is_own is not None and is_own(file)):
        return  # a device or a pipe, as /dev/stdout, loses nothing
    instead = ("--overwrite", f"{option} {shlex.quote(str(free_file(file)))}")
    refuse_option(option, str(file), "the file already exists", *instead)


def write_file(option: str, file: Path, text: str, *, overwrite: bool) -> None:
    """Write a file that `require_writable` has admitted, completely or not at all, in UTF-8.

    Raises:
        UserError: the file exists by now, or cannot be written there.
        OSError: the disk is full or failing.
    """
    require_writable(option, file, overwrite=overwrite)
    try:
        if file.exists() and not file.is_file():
            with file.open("w", encoding="utf-8") as stream:
                stream.write(text)
        else:
            write_atomically(file.resolve(), text)  # the target of a link, not the link
    except (FileNotFoundError, PermissionError) as error:  # /proc, which takes no files
        raise UserError("usage", f"{option} {file}: {error.strerror}") from error


def free_file(file: Path) -> Path:
    """Return a file of a similar name that does not exist yet."""
    others = (file.with_stem(f"{file.stem}-{number}") for number in itertools.count(2))
    return next(other for other in others if not other.exists())
