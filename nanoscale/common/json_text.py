"""JSON from files that others may have written."""

import json
import re
from typing import Any

Json = dict[str, Any]
"""A JSON object."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse(text: str | bytes) -> Any:
    """Parse JSON.

    Raises:
        ValueError: it is not JSON, is not UTF-8, holds half of a surrogate pair, or is nested too deeply.
    """
    try:
        value = json.loads(text)
        if _SURROGATE.search(text if isinstance(text, str) else text.decode()):
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeEncodeError:
        raise ValueError("it holds half of a surrogate pair, which is not text") from None
