"""The check of the language in `make lint`: how docstrings open, and phrases that nothing may contain.

The docstring of a function opens with an imperative ("Return …"), of a module, a class or an attribute with
a noun, and of a boolean with "True if". The phrases are checked in code, comments, messages, YAML and
documents.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("nanoscale", "tests", "benchmarks", "dev", "scripts")
TEXTS = (*FOLDERS, "conf", "recipes", "docs", "examples", "README.md")
SUFFIXES = (".py", ".md", ".yaml", ".sh", ".sbatch")

FORBIDDEN = re.compile(
    r"\W*(of|as|by|with|those|where|that|what|whether|from|how|which|who)\b", re.IGNORECASE
)
PHRASES = {
    r"(?<!here )\b(is|are|was|were) no (?!longer\b|more\b)": "is not a; unknown (key, recipe)",
    r"\b(is|are) no more\b": "no longer exists",
    r"\bthat there (is|are)\b[.,;:)]": "that exists",
    r"\b(go|goes|going|gone|went) on\b(?! (the|a|an) )": "continue, resume; is running",
    r"\b(is|are|was|were|be|been|being) (told|said)\b": "is reported, is set, is shown",
    r"\bheld against\b": "compared with",
    r"\bdearest\b": "most expensive",
    r"\bfault in nanoscale\b": "internal error",
    r"\b(heeded|minds)\b": "reacts to, is ignored, supervises",
    r"\bfell silent\b|\bno word\b": "stopped responding, without a message",
    r"\bfor ever\b": "forever",
    r"\banew\b": "again, from the beginning",
    r"\bmend(s|ed|ing)?\b": "fix, correct",
    r"\bnot offered\b": "not supported",
    r"(?<=\w )in all(?=[.,;:)\"']|$)": "in total",
    r"\b(beside|of|to) (its|their) masters\b|\bthe masters\b": "master weights",
    r"\bcan be had\b|\bcannot be had\b": "is available, cannot be loaded",
    r"\btaken for lost\b|\btake .{1,30} for lost\b": "treated as lost",
}
"""Phrases that the readers' English does not have → what to write."""
RIDDLE = re.compile(r"\b(those\s+(that|of|which)|that\s+(of|which))\b", re.IGNORECASE)
"""Pronouns in place of a noun, in docstrings and pages."""


def openings(path: Path) -> Iterator[str]:
    """Yield a line for each docstring of a file that opens with a forbidden word or lacks a noun."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for statement in node.body:
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    if word := FORBIDDEN.match(text):
                        yield f"{path}:{statement.lineno}: this docstring opens with `{word[1]}`"
                    if match := RIDDLE.search(text):
                        yield f"{path}:{statement.lineno}: `{match[0]}`: write the noun"


def phrases(path: Path) -> Iterator[str]:
    """Yield a line for each forbidden phrase of a file."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        for phrase, instead in PHRASES.items():
            if match := re.search(phrase, line):
                yield f"{path}:{number}: `{match[0]}`: write {instead}"
        is_quoted = path.name == "model-cards.md"  # sentences of the program
        if path.suffix == ".md" and not is_quoted and (match := RIDDLE.search(line)):
            yield f"{path}:{number}: `{match[0]}`: write the noun"


def files(roots: tuple[str, ...]) -> Iterator[Path]:
    for root in map(Path, roots):
        yield from [root] if root.is_file() else sorted(root.rglob("*"))


def main() -> int:
    lines = [line for path in files(FOLDERS) if path.suffix == ".py" for line in openings(path)]
    for path in files(TEXTS):
        if path.suffix in SUFFIXES and path != Path(__file__).relative_to(Path.cwd()):
            lines += phrases(path)
    for line in lines:
        print(line)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
