"""The boundary to the screen: every text that the launcher shows passes here, and nothing else prints.

A message of a rank, the name of a host, a line of a file or of a model from a hub may contain control
characters of terminals: escape sequences that write to the clipboard or clear the screen, a carriage return
that overwrites a line, marks that reverse the direction of reading. `clean` turns them into visible text.
Files (logs, metrics.jsonl, events.jsonl) keep them unchanged.

A screen may also be lost (a pipe whose reader has closed it, a terminal that was closed, a full disk behind a
redirection) or support fewer characters than nanoscale writes. Neither may end a training: `note` gives up a
lost stream, `show` raises unless it is within `survive_lost_stream`, and a character that the stream's
encoding lacks is written in ASCII.
"""

from __future__ import annotations

import codecs
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, Any, Self, TextIO, cast

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment
    from rich.table import Table
    from rich.text import Text

_FILE_COLUMNS = 1000
"""Columns of a file, in which no table wraps."""
_CONTROL_CHARACTERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 but tab and line feed, DEL, C1
    "\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ufff9-\ufffb\U000e0000-\U000e007f"  # bidi, invisible
    "\ud800-\udfff]"  # bytes of a file name that are not UTF-8
)

_ASCII_ERRORS = "nanoscale.ascii"
_ASCII = {
    **dict(zip("▁▂▃▄▅▆▇█–−⋮×·•│｜µ✓✗⌉ḡë", "_.-=+*%#--:x**||u+x)ge", strict=True)),
    **dict.fromkeys("…⋯", "..."),
    "→": "->",
    "≤": "<=",
    "≥": ">=",
    "√": "sqrt ",
    "Σ": "sum ",
    "⌈": "ceil(",
    "⟦": "[[",
    "⟧": "]]",
    "⁹": "^9",
    "²": "^2",
    "ᵀ": "^T",
    "α": "alpha",
    "β": "beta",
}


class ReaderLeftError(Exception):
    """A stream has no reader any more; no OSError, as the command line's library would handle that itself."""


def clean(text: str) -> str:
    r"""Return the text with control characters of terminals as escapes, as in `\x1b`."""
    return _CONTROL_CHARACTERS.sub(_escaped, text.replace("\r\n", "\n"))


def show(text: str = "", *, end: str = "\n", stream: TextIO | None = None) -> None:
    """Write a cleaned text, by default to standard output.

    Raises:
        OSError: the stream cannot be written to.
        ReaderLeftError: nobody reads it any more.
    """
    stream = sys.stdout if stream is None else stream
    with _detect_lost_reader():
        stream.write(clean(text) + end)
        stream.flush()


def note(text: str = "", *, end: str = "\n") -> None:
    """Write a cleaned text to standard error. A lost stream is given up."""
    with survive_lost_stream(sys.stderr):
        show(text, end=end, stream=sys.stderr)


def progress(text: str, *, end: str = "") -> None:
    """Write a cleaned text to standard error, a terminal, over the present line."""
    with survive_lost_stream(sys.stderr):
        sys.stderr.write(f"\r\x1b[K{clean(text)}{end}")
        sys.stderr.flush()


def content(data: str | bytes) -> None:
    """Write a file's or a model's text to standard output: cleaned on a terminal, unchanged elsewhere.

    Raises: see `show`.
    """
    binary = getattr(sys.stdout, "buffer", None)
    if sys.stdout.isatty() or binary is None:
        show(data if isinstance(data, str) else data.decode(errors="replace"), end="")
        return
    with _detect_lost_reader():
        sys.stdout.flush()
        binary.write(data if isinstance(data, bytes) else data.encode(errors="surrogateescape"))
        binary.flush()


def has_utf8(stream: TextIO) -> bool:
    with suppress(LookupError, TypeError):
        return codecs.lookup(stream.encoding).name.startswith("utf")
    return False


@contextmanager
def survive_lost_stream(stream: TextIO) -> Iterator[None]:
    """Give up the stream if the block cannot write to it: later output is dropped."""
    try:
        yield
    except (OSError, ReaderLeftError):
        give_up(stream)


def give_up(stream: TextIO) -> None:
    """Drop all later output to the stream, and its buffer."""
    with suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def prepare_streams() -> None:
    """Make the standard streams of this process safe: a closed one drops its output, and none lacks a
    character."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            _open_null(number, name)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors=_ASCII_ERRORS)


def console(stream: TextIO | None = None) -> Console:
    """Return the console for human output: colors on a terminal only, lines are never cut, all text is
    cleaned.

    Square brackets and `:names:` are plain text.
    """
    stream = sys.stdout if stream is None else stream
    return _screen_class()(
        file=stream, highlight=False, markup=False, emoji=False, soft_wrap=not stream.isatty()
    )


class LiveScreen:
    """A display that changes in place on a terminal. Use it as a context."""

    def __init__(self, stream: TextIO, **options: Any) -> None:
        self.stream, self.console = stream, console(stream)
        self.live: Any = None
        """rich's display on a terminal; None elsewhere."""
        if self.console.is_terminal:
            from rich.live import Live

            self.live = Live(console=self.console, transient=True, **options)

    def __enter__(self) -> Self:
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.stop()


def print_lines(screen: Console, text: str, style: str | None = None) -> None:
    """Print lines, which wrap at blanks on a terminal, except lines with a longer word, as a path to copy."""
    for line in text.split("\n"):
        is_long = max(map(len, line.split()), default=0) > screen.width
        screen.print(line, style=style, soft_wrap=is_long or screen.soft_wrap)


def print_table(screen: Console, table: Table) -> None:
    """Print a table; a file has no edge to wrap at, and needs no trailing blanks."""
    if screen.is_terminal:
        screen.print(table)
        return
    screen.width = _FILE_COLUMNS
    with screen.capture() as printed:
        screen.print(table)
    for line in printed.get().splitlines():
        show(line.rstrip(), stream=cast("TextIO", screen.file))


@cache
def _screen_class() -> type[Console]:
    from rich.console import Console

    class Screen(Console):
        """A console that cleans texts after they have become segments of lines."""

        def render(
            self, renderable: RenderableType, options: ConsoleOptions | None = None
        ) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                if segment.control is None and _CONTROL_CHARACTERS.search(segment.text):
                    segment = segment._replace(text=clean(segment.text))
                yield segment

        def render_str(self, text: str, **how: Any) -> Text:
            return super().render_str(clean(text), **how)

        def on_broken_pipe(self) -> None:
            """Let the caller handle it; rich itself would end the process here."""
            raise ReaderLeftError

    return Screen


@contextmanager
def _detect_lost_reader() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise ReaderLeftError from None


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode("ascii")


def _open_null(number: int, name: str) -> None:
    """Open a closed descriptor, so that no other file gets its number and is written to by mistake."""
    null = os.open(os.devnull, os.O_RDWR)
    if null != number:
        os.dup2(null, number)
        os.close(null)
    mode = "r" if name == "stdin" else "w"
    setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def _replace_with_ascii(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    missing = error.object[error.start : error.end]
    return "".join(map(_ascii_of, missing)), error.end


def _ascii_of(char: str) -> str:
    if "\u2800" <= char <= "\u28ff":  # a spinner's frame
        return "*"
    return _ASCII.get(char) or char.encode("unicode_escape").decode("ascii")


codecs.register_error(_ASCII_ERRORS, _replace_with_ascii)
