"""The planner's memory against what others have measured."""

from __future__ import annotations

from statistics import mean

from benchmarks.plan.published_memory import compare


def errors(source: str) -> list[float]:
    return [one.error for one in compare() if one.source == source]


def test_megatron_s_allocated_memory():
    found = errors("SimuMax")
    assert mean(map(abs, found)) < 0.03
    assert max(map(abs, found)) < 0.06


def test_torchtitan_s_reserved_memory():
    found = errors("torchtitan")
    assert mean(map(abs, found)) < 0.05
    assert max(map(abs, found)) < 0.10
