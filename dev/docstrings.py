"""The check of docstrings in `make lint`: none opens with a word that hides its subject or its verb.

The docstring of a function opens with an imperative ("Return …"), that of a module, a class or an attribute
with a noun, and that of a boolean with "True if".
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("nanoscale", "tests", "benchmarks", "dev", "scripts")
FORBIDDEN = re.compile(
    r"\W*(of|as|by|with|those|where|that|what|whether|from|how|which|who)\b", re.IGNORECASE
)


def problems(path: Path) -> Iterator[str]:
    """Yield a line for each docstring of a file that opens with a forbidden word."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for statement in node.body:
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    if word := FORBIDDEN.match(text):
                        yield f"{path}:{statement.lineno}: this docstring opens with `{word[1]}`"


def main() -> int:
    files = (path for folder in FOLDERS for path in sorted(Path(folder).rglob("*.py")))
    lines = [line for path in files for line in problems(path)]
    for line in lines:
        print(line)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
