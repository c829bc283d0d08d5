"""JSON from files that others may have written."""

from __future__ import annotations

import json
from typing import Any


def parse(text: str | bytes) -> Any:
    """Parse JSON.

    Raises:
        ValueError: it is not JSON, is not UTF-8, or is nested too deeply to be read.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
