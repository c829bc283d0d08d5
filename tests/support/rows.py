"""Rows of parametrized tests that only `make test-exhaustive` runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import pytest


def exhaustive(*values: Any, name: str | None = None) -> Any:
    """Return a row that repeats what another one shows."""
    return pytest.param(*values, id=name, marks=pytest.mark.exhaustive)


def usual_rows(rows: Mapping[str, Any], usual: Collection[str]) -> list[Any]:
    """Return the rows by name; rows that are not usual are marked exhaustive."""
    assert set(usual) <= rows.keys()
    return [
        pytest.param(row, id=name) if name in usual else exhaustive(row, name=name)
        for name, row in rows.items()
    ]
