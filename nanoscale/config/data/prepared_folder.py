"""The folder of `nanoscale data prepare`: names, and the manifest that describes it.

 OUT/  tokens.bin tokens.idx  valid.bin valid.idx  tokenizer.json tokenizer_config.json  manifest.json
       tokens.answers  valid.answers  chat_template.jinja

The files of `valid` are present with --validation, those of the tokenizer unless bytes are the tokens, and
those of the second line with --chat.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TOKENS = "tokens"
VALID = "valid"
TOKENIZER = "tokenizer.json"
TEMPLATE = "chat_template.jinja"
MANIFEST = "manifest.json"


def answers_of(prefix: str | Path) -> Path:
    """Return the file of the marks of answers of a prefix: one byte per token, 1 for tokens of an answer, else
    0."""
    return Path(f"{prefix}.answers")


def folder_of(path: str | Path) -> Path | None:
    """Return the prepared folder that a path is, or whose tokens it names; None if there is none."""
    given = Path(path).expanduser()
    for folder in (given, given.parent):
        named = folder == given or given.name in (TOKENS, VALID)
        if named and (folder / MANIFEST).is_file() and (folder / f"{TOKENS}.idx").is_file():
            return folder
    return None


def manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of a prepared folder; None if it is missing or unreadable."""
    try:
        found = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
