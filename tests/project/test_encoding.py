"""All text that nanoscale writes and reads is UTF-8 in every locale."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import nanoscale

PACKAGE = Path(nanoscale.__file__).parent
LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
"""A locale in which Python's own default is ASCII."""


def test_every_file_is_opened_with_its_encoding():
    for path in PACKAGE.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(call, ast.Call):
                assert not lacks_encoding(call), f"{path}:{call.lineno} {ast.unparse(call)}"


def lacks_encoding(call):
    """True if a call reads or writes text in the locale's encoding."""
    name = ast.unparse(call.func)
    given = {keyword.arg for keyword in call.keywords}
    if "encoding" in given:
        return False
    if name.endswith((".read_text", ".write_text")):
        return len(call.args) < (1 if name.endswith(".read_text") else 2)
    if name.startswith("subprocess."):
        return "text" in given or "universal_newlines" in given
    opens = name == "open" or (
        name.endswith(".open") and name not in ("os.open", "RunDirectory.open")
    )
    modes = [arg.value for arg in call.args if isinstance(arg, ast.Constant)]
    return opens and any(
        isinstance(mode, str) and mode in ("r", "w", "a", "x", "r+") for mode in modes
    )


def test_pages_are_utf8_in_a_locale_without_it(tmp_path):
    command = [sys.executable, "-m", "nanoscale", "plan", "recipe=debug", "--html", "page.html"]
    environment = {**os.environ, **LOCALE, "PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    page = (tmp_path / "page.html").read_text("utf-8")
    assert "×" in page and 'charset="utf-8"' in page
