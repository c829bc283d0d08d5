"""Reports of blocks, shown as text on the terminal and as self-contained HTML pages."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoscale.common import display

if TYPE_CHECKING:
    import rich.table
    from rich.console import Console
    from rich.text import Text

LONG = ("how", "purposes")
"""The headers of columns with long texts, which wrap on a terminal and in a file."""
_PAGE_COLUMNS = 135
"""The columns of a drawing in text on a page."""


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
    text: Callable[[Any], str]
    """The cell of a row."""
    is_text: bool = False
    """False: numbers, which are aligned to the right, unless the column is the first."""


@dataclass(frozen=True)
class Table:
    """A table of texts."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    texts: Collection[str] = ()
    """The headers of columns that are aligned to the left, in addition to the first and to `LONG`."""

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
    cells = [[column.text(row) for column in columns] for row in rows]
    return Table([column.header for column in columns], cells, title, texts)


# --- the terminal ---------------------------------------------------------------------------------


def show(screen: Console, report: Report) -> None:
    """Print a report: its title, and its blocks separated by empty lines."""
    width = screen.width
    if report.title:
        screen.print(report.title, soft_wrap=True)
    separated = True
    for block in report.blocks:
        text = block.draw(width) if isinstance(block, Chart) else ""
        if not (text or (block.lines if isinstance(block, Lines) else isinstance(block, Table))):
            continue
        if not separated:
            screen.print()
        separated = isinstance(block, Lines) and bool(block.style)
        if isinstance(block, Lines):
            screen.print("\n".join(block.lines), style=block.style or None)
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
    """Return a table for a terminal; beyond `width` columns it folds the first column, and wraps at blanks."""
    from rich.table import Table as RichTable

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
            no_wrap=is_tight and number > 0 and not any(" " in cell for cell in cells),
        )
    for row in block.rows:
        result.add_row(*row)
    return result


# --- pages ----------------------------------------------------------------------------------------


def escape(text: str) -> str:
    """Return a text for a page; control characters become visible, as on a terminal."""
    return html.escape(display.clean(text))


def page(report: Report) -> str:
    """Return a report as a page: no script, no other file. All texts are escaped, except pictures."""
    title = escape(report.page_title or report.title)
    style = Path(__file__).with_name("style.css").read_text(encoding="utf-8")
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
        yield f"<pre>{_text_html(block.draw(_PAGE_COLUMNS))}</pre>"


def _cell(tag: str, block: Table, number: int, text: str) -> str:
    kind = "" if block.is_text(number) else ' class="n"'
    if block.header[number] in LONG and tag == "td":
        kind = ' class="how"'
    return f"<{tag}{kind}>{escape(text)}</{tag}>"


def _text_html(text: Text | str) -> str:
    """Return a text with its colors."""
    screen = display.console(io.StringIO())
    screen.record = True
    screen.print(text, end="", soft_wrap=True)
    return screen.export_html(code_format="{code}", inline_styles=True)
