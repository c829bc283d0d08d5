"""What is written by a program is what the program writes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "dev" / "reference.py"


def test_the_references_are_those_of_the_schema_and_the_rules() -> None:
    spec = importlib.util.spec_from_file_location("reference", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for page, text in script.pages().items():
        assert (script.DOCS / page).read_text() == text, "run `make docs`"
