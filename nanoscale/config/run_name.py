"""The names that a run can have."""

from __future__ import annotations

LONGEST = 200
"""The most bytes of a name."""
RULE = (
    f"names a folder: at most {LONGEST} bytes, without slashes and control characters, "
    f"not starting with a dot or dash"
)


def legal_name(name: str) -> str:
    """Return the nearest legal name: `name` itself if it is legal; empty if there is none."""
    kept = "".join("-" if char in "/\\" or not char.isprintable() else char for char in name)
    return kept.lstrip(".- ").encode()[:LONGEST].decode(errors="ignore").rstrip()
