"""Print the size of the Python code by folder, and the difference from main: `make size`.

Lines are all lines of a file. Tokens are names, operators, numbers and strings, without comments and
docstrings, so that neither a denser layout nor a missing explanation makes code look smaller.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
HALVES = ("nanoscale", "tests", "benchmarks", "dev")
_CODE = {tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING}
_LAYOUT = {tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT}
_STATEMENT_ENDS = {tokenize.NEWLINE, tokenize.ENCODING}
# Since Python 3.12 an f-string is several tokens; counted as one, the figure is the same on every version.
_BEGINS = {getattr(tokenize, "FSTRING_START", None)}
_ENDS = {getattr(tokenize, "FSTRING_END", None)}


class Size(NamedTuple):
    """The size of some files."""

    lines: int
    tokens: int


def measure(source: bytes) -> Size:
    """Return the lines and tokens of a Python file."""
    tokens, depth, previous = 0, 0, tokenize.ENCODING
    for token in tokenize.tokenize(io.BytesIO(source).readline):
        if token.type in _LAYOUT:
            continue
        if token.type in _BEGINS:
            tokens += depth == 0
            depth += 1
        elif token.type in _ENDS:
            depth -= 1
        elif token.type in _CODE and depth == 0:
            is_docstring = token.type == tokenize.STRING and previous in _STATEMENT_ENDS
            tokens += not is_docstring
        previous = token.type
    return Size(len(source.splitlines()), tokens)


def sizes(files: Iterator[tuple[str, bytes]]) -> dict[str, Size]:
    """Return the size of each folder of `nanoscale` and of each other part, by path."""
    lines: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for path, source in files:
        first, *inner = path.split("/")
        folder = f"{first}/{inner[0]}" if first == "nanoscale" and len(inner) > 1 else first
        size = measure(source)
        for name in {folder, first}:
            lines[name] += size.lines
            tokens[name] += size.tokens
    return {name: Size(lines[name], tokens[name]) for name in lines}


def working_tree() -> Iterator[tuple[str, bytes]]:
    """Yield path and content of the Python files that are here."""
    for half in HALVES:
        for file in (ROOT / half).rglob("*.py"):
            yield file.relative_to(ROOT).as_posix(), file.read_bytes()


def committed(revision: str) -> Iterator[tuple[str, bytes]]:
    """Yield path and content of the Python files of a revision."""
    command = ["git", "archive", revision, *HALVES]
    archive = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            file = tar.extractfile(member) if member.name.endswith(".py") else None
            if file is not None:
                yield member.name, file.read()


def main() -> None:
    revision = sys.argv[1] if len(sys.argv) > 1 else "main"
    now, before = sizes(working_tree()), sizes(committed(revision))
    print(f"{'':24}{'lines':>9}{'change':>9}{'tokens':>10}{'change':>9}")
    nothing = Size(0, 0)
    for name in sorted(now.keys() | before.keys(), key=lambda name: (HALVES[0] not in name, name)):
        size, old = now.get(name, nothing), before.get(name, nothing)
        changes = (size.lines - old.lines, size.tokens - old.tokens)
        cells = [f"{change:+9,}" if change else " " * 9 for change in changes]
        print(f"{name:24}{size.lines:9,}{cells[0]}{size.tokens:10,}{cells[1]}".rstrip())


if __name__ == "__main__":
    main()
