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


def bad_records_error(
    bad_records: Sequence[Bad], kept: str = "", *, nothing_else: bool = False
) -> UserError:
    """Return the error for bad records, of which `bad_records` are the first.

    Args:
        kept: a clause on what was prepared before.
        nothing_else: True if no data would be left without them.
    """
    remedy = "fix these records" + ("" if nothing_else else ", or skip them with --bad skip")
    violations = [
        Violation(bad.place, None, "", bad.what, remedy="" if remaining else f"{remedy}{kept}")
        for remaining, bad in zip(range(len(bad_records) - 1, -1, -1), bad_records, strict=True)
    ]
    if len(bad_records) == 1:
        return UserError("data", f"{bad_records[0].place}: {bad_records[0].what}", violations)
    return UserError("data", f"{len(bad_records)} bad records", violations)
