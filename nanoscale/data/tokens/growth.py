"""The most by which a tokenizer.json makes a text longer before it becomes tokens, or tokens become a text.

Five `Replace` of `a` by a hundred of them make 10 GB of one letter, and the library then aborts the process.
"""

from __future__ import annotations

import base64
import re
from typing import Any

from nanoscale.common.json_text import parse

MOST = 64
"""The most characters for each one of a text. Unicode's NFKC makes 18 of one, and a prefix doubles them."""


def growth(native: Any) -> float:
    """Return the most characters that a tokenizer of the library makes of one character.

    Raises:
        ValueError: a part of it cannot be read.
    """
    parts = (native.normalizer, native.decoder)
    return max(_growth(parse(part.__getstate__())) if part is not None else 1.0 for part in parts)


def _growth(part: dict[str, Any]) -> float:
    result = 1.0
    for inner in (*part.get("normalizers", ()), *part.get("decoders", ())):
        result *= _growth(inner)
    if part["type"] == "Replace":
        width, length = _width(part["pattern"]), len(part["content"])
        result *= max(1.0, length / width if width else 1 + length)
    elif part["type"] == "Prepend":
        result *= 1 + len(part["prepend"])
    elif part["type"] == "Precompiled":
        result *= _longest(base64.b64decode(part["precompiled_charsmap"]))
    return result


def _width(pattern: dict[str, str]) -> int:
    """Return the least characters that a pattern matches; 0 if it is not known."""
    if "String" in pattern:
        return len(pattern["String"])
    try:
        return int(re._parser.parse(pattern["Regex"]).getwidth()[0])  # type: ignore[attr-defined]
    except (re.error, RecursionError, OverflowError):
        return 0


def _longest(charsmap: bytes) -> int:
    """Return the characters of the longest text of a map of sentencepiece, which follow its trie."""
    texts = charsmap[4 + int.from_bytes(charsmap[:4], "little") :].split(b"\0")
    return max(1, *(len(text.decode(errors="replace")) for text in texts))
