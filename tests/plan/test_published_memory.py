"""The planner's memory against what others have measured; the file is not part of the project."""

from __future__ import annotations

from statistics import mean

import pytest

from benchmarks.plan.published_memory import DEFAULT, compare

pytestmark = pytest.mark.skipif(
    not DEFAULT.is_file(), reason=f"{DEFAULT.name} is not in ../shared/data"
)


def errors(source: str) -> list[float]:
    return [one.error for one in compare(DEFAULT) if one.source == source]


def test_megatron_s_allocated_memory():
    found = errors("SimuMax")
    assert mean(map(abs, found)) < 0.03
    assert max(map(abs, found)) < 0.06


def test_torchtitan_s_reserved_memory():
    found = errors("torchtitan")
    assert mean(map(abs, found)) < 0.05
    assert max(map(abs, found)) < 0.10
