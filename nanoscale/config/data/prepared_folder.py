"""The folder that `nanoscale data prepare` makes: names, and the manifest that describes it.

    OUT/  tokens.bin tokens.idx  valid.bin valid.idx  tokenizer.json tokenizer_config.json  manifest.json
          tokens.answers  valid.answers  chat_template.jinja

The files of `valid` are there with --validation, those of the tokenizer unless bytes are the tokens, and those
of the second line with --chat.
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
    """Which tokens of a prefix are answers: one byte a token, 1 where it is of an answer, else 0."""
    return Path(f"{prefix}.answers")


def folder_of(path: str | Path) -> Path | None:
    """The prepared folder that a path is, or whose tokens it names; None where it is none."""
    given = Path(path).expanduser()
    for folder in (given, given.parent):
        named = folder == given or given.name in (TOKENS, VALID)
        if named and (folder / MANIFEST).is_file() and (folder / f"{TOKENS}.idx").is_file():
            return folder
    return None


def manifest(folder: Path) -> dict[str, Any] | None:
    """What is in a prepared folder; None where its manifest says nothing."""
    try:
        found = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
