"""Records that cannot be prepared, and their positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nanoscale.common.errors import UserError, Violation


@dataclass(frozen=True)
class Bad:
    """A record, or the rest of a file, that is not a document."""

    place: str
    """`corpus/a.jsonl:17`, or `corpus/b.parquet, row 3`."""
    what: str


def refused(found: Sequence[Bad], kept: str = "") -> UserError:
    """Return the error for bad records, of which `found` are the first."""
    remedy = "fix these records, or skip them with --bad skip"
    violations = [
        Violation(bad.place, None, "", bad.what, remedy="" if more else f"{remedy}{kept}")
        for more, bad in zip(range(len(found) - 1, -1, -1), found, strict=True)
    ]
    if len(found) == 1:
        return UserError("data", f"{found[0].place}: {found[0].what}", violations)
    return UserError("data", f"{len(found)} bad records", violations)
