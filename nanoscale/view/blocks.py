"""Reports of blocks, shown as text on the terminal and as self-contained HTML pages."""

from __future__ import annotations

import html
import io
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoscale.common import display

if TYPE_CHECKING:
    import rich.table
    from rich.console import Console
    from rich.text import Text

LOOKS = {
    "running": "bold blue",
    "completed": "green",
    **dict.fromkeys(("failed", "damaged", "never", "lost"), "bold red"),
    **dict.fromkeys(("prepared", "starting", "queued", "waiting"), "yellow"),
}
"""Styles of a run's state, by a word of it; a page has the same looks."""
LONG = ("how", "purposes")
"""The headers of columns with long texts, which wrap on a terminal and in a file."""
_PAGE_COLUMNS = {"wide": 135, "narrow": 60}
"""The columns of a drawing in text on a page, by the class of its element."""


@dataclass(frozen=True)
class Lines:
    """Lines of text."""

    lines: Sequence[str]
    style: str = ""
    """A style of rich, whose words are classes on a page. Styled lines belong to the block below them."""


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    header: str
    text: Callable[[Any], str] | str
    """Returns the cell of a row, or names the value that is the cell."""
    is_text: bool = False
    """False: numbers, which are aligned to the right, unless the column is the first."""
    optional: int = 0
    """The most lines for a name in the first column: the column is left out rather than break a name into
    more; the least is left out first. 0: the column stays. A page on a phone lacks all optional columns."""

    def cell(self, row: Any) -> str:
        return str(row[self.text]) if isinstance(self.text, str) else self.text(row)


@dataclass(frozen=True)
class Table:
    """A table of texts."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    texts: Collection[str] = ()
    """The headers of columns that are aligned to the left, in addition to the first and to `LONG`."""
    optional: Mapping[str, int] = field(default_factory=dict)
    """The headers of columns that may be left out, the first one first, as in `Column.optional`."""

    def is_text(self, number: int) -> bool:
        """True if a column is aligned to the left."""
        return number == 0 or self.header[number] in (*self.texts, *LONG)


@dataclass(frozen=True)
class Chart:
    """A drawing in text, and its pictures in place of the text on a page."""

    draw: Callable[[int], Text | str] = lambda _: ""
    """The drawing in so many columns; "": only the page has it."""
    pictures: Sequence[str] = ()
    """SVG elements; none: a page has the text."""
    title: str = ""
    """A heading on a page."""


Block = Lines | Table | Chart


@dataclass(frozen=True)
class Report:
    """A title and the blocks below it: the output of a command for people."""

    title: str
    """The first line; "": none."""
    blocks: Sequence[Block]
    page_title: str = ""
    """The title of a page; "": the first line."""


def table(columns: Sequence[Column], rows: Iterable[Any], title: str = "") -> Table:
    """Return a table of rows, each cell from its column."""
    texts = [column.header for column in columns if column.is_text]
    cells = [[column.cell(row) for column in columns] for row in rows]
    optional = {it.header: it.optional for it in columns if it.optional}
    ordered = dict(sorted(optional.items(), key=lambda pair: pair[1]))
    return Table([column.header for column in columns], cells, title, texts, ordered)


# --- the terminal ---------------------------------------------------------------------------------


def show(screen: Console, report: Report) -> None:
    """Print a report: its title, and its blocks separated by empty lines."""
    width = screen.width
    if report.title:
        display.print_lines(screen, report.title)
    separated = True
    for block in report.blocks:
        text = block.draw(width) if isinstance(block, Chart) else ""
        if not (text or (block.lines if isinstance(block, Lines) else isinstance(block, Table))):
            continue
        if not separated:
            screen.print()
        separated = isinstance(block, Lines) and bool(block.style)
        if isinstance(block, Lines):
            display.print_lines(screen, "\n".join(block.lines), block.style or None)
        elif isinstance(block, Table):
            show_table(screen, block)
        else:
            screen.print(text, end="", soft_wrap=True)


def show_table(screen: Console, block: Table) -> None:
    """Print a table; one with long texts wraps in a file, too."""
    if {*LONG} & {*block.header}:
        screen.print(rich_table(block))
    else:
        display.print_table(screen, rich_table(block, screen.width if screen.is_terminal else None))


def rich_table(block: Table, width: int | None = None) -> rich.table.Table:
    """Return a table for a terminal: if it is wider than `width` columns, it lacks optional columns, folds the
    first one, and wraps at blanks."""
    from rich.table import Table as RichTable
    from rich.text import Text

    block, room = (block, 0) if width is None else _fitting(block, width)
    columns = [[name, *cells] for name, *cells in zip(block.header, *block.rows, strict=True)]
    natural = sum(max(map(len, column)) + 2 for column in columns) - 2
    is_tight = width is not None and natural > width
    result = RichTable(title=block.title or None, title_justify="left", box=None, pad_edge=False)
    result.padding = (0, 1, 0, 0) if is_tight else (0, 1)
    for number, (name, *cells) in enumerate(columns):
        result.add_column(
            name.replace(" ", "\n") if is_tight else name,
            justify="left" if block.is_text(number) else "right",
            overflow="fold" if name in LONG or number == 0 else "ellipsis",
            no_wrap=is_tight and number > 0 and not _wraps(block, number, cells),
            width=room if is_tight and room > 0 and number == 0 else None,
        )
    for first, *others in block.rows:
        row = ["\n".join(_broken(first, room)) if is_tight and room > 0 else first, *others]
        styles = map(state_style, block.header, row)
        texts = zip(map(display.clean, row), styles, strict=True)
        result.add_row(*(Text(text, style) for text, style in texts))
    return result


def _fitting(block: Table, width: int) -> tuple[Table, int]:
    """Return a table with the optional columns that fit, and the width of its first column."""
    optional = dict(block.optional)
    while True:
        first, *others = zip(block.header, *block.rows, strict=True)
        longest = max(map(len, first))
        least = [_least_width(block, *column) for column in enumerate(others, start=1)]
        room = min(longest, width - 1 - sum(least))
        lines = max(len(_broken(name, room)) for name in first) if room > 0 else sys.maxsize
        left_out = next((name for name, most in optional.items() if lines > most), None)
        if left_out is None:
            return block, room
        del optional[left_out]
        at = block.header.index(left_out)
        rows = [[*row[:at], *row[at + 1 :]] for row in block.rows]
        block = replace(block, header=[*block.header[:at], *block.header[at + 1 :]], rows=rows)


def _wraps(block: Table, number: int, cells: Sequence[str]) -> bool:
    """True if the cells of a column may wrap at blanks: texts, not numbers."""
    return block.is_text(number) and any(" " in cell for cell in cells)


def _least_width(block: Table, number: int, column: Sequence[str]) -> int:
    """Return the width of a column and its gap in which words are whole, and texts need about two lines."""
    header, *cells = column
    words = header.split()
    if _wraps(block, number, cells):
        words += [word for cell in cells for word in [*cell.split(), cell[: (len(cell) + 1) // 2]]]
    else:
        words += cells
    return 1 + max(map(len, words), default=0)


def _broken(name: str, width: int) -> list[str]:
    """Break a name into lines of at most `width` characters, after punctuation if that is possible."""
    pattern = rf".{{1,{width}}}$|.{{{width // 2 + 1},{width}}}(?<=[-_=,./ ])|.{{1,{width}}}"
    return re.findall(pattern, name) or [""]


def state_style(header: str, text: str) -> str:
    """Return the style of a cell: a state's look, or the color of bars."""
    if header in ("bar", "curve") and text != header:
        return "blue"
    looks = (look for word, look in LOOKS.items() if word in text.split())
    return next(looks, "") if header == "state" else ""


# --- pages ----------------------------------------------------------------------------------------


def escape(text: str) -> str:
    """Return a text for a page; control characters become visible, as on a terminal."""
    return html.escape(display.clean(text))


def page(report: Report) -> str:
    """Return a report as a page: no script, no other file. All texts are escaped, except pictures."""
    title = escape(report.page_title or report.title)
    style = Path(__file__).with_name("style.css").read_text("utf-8")
    head = f'<meta charset="utf-8"><title>{title}</title>'
    return "\n".join(
        [
            f'<!doctype html>\n<html lang="en">\n<head>{head}',
            f'<meta name="viewport" content="width=device-width">\n<style>\n{style}</style></head>',
            f"<body>\n<h1>{title}</h1>",
            *(part for block in report.blocks for part in _html(block)),
            "</body>\n</html>\n",
        ]
    )


def _html(block: Block) -> Iterator[str]:
    if isinstance(block, Lines):
        look = f' class="{block.style}"' if block.style else ""
        yield from (f"<p{look}>{escape(text)}</p>" for text in block.lines)
        return
    if block.title:
        yield f"<h2>{escape(block.title[0].upper() + block.title[1:])}</h2>"
    if isinstance(block, Table):
        yield "<table>"
        for tag, row in [("th", block.header), *(("td", row) for row in block.rows)]:
            yield f"<tr>{''.join(_cell(tag, block, *cell) for cell in enumerate(row))}</tr>"
        yield "</table>"
    elif block.pictures:
        yield f'<div class="pictures">{"".join(block.pictures)}</div>'
    else:
        for kind, columns in _PAGE_COLUMNS.items():
            yield f'<pre class="{kind}">{_text_html(block.draw(columns))}</pre>'


def _cell(tag: str, block: Table, number: int, text: str) -> str:
    header = block.header[number]
    is_long = header in LONG and tag == "td"
    kinds = ["how" if is_long else "" if block.is_text(number) else "n"]
    kinds += [state_style(header, text), "optional" if header in block.optional else ""]
    kind = " ".join(filter(None, kinds))
    look = f' class="{kind}"' if kind else ""
    return f"<{tag}{look}>{escape(text)}</{tag}>"


def _text_html(text: Text | str) -> str:
    """Return a text with its colors."""
    screen = display.console(io.StringIO())
    screen.record = True
    screen.print(text, end="", soft_wrap=True)
    return screen.export_html(code_format="{code}", inline_styles=True)
