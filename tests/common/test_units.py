"""Durations and sizes in the units that people read."""

from __future__ import annotations

import pytest

from nanoscale.common.units import GIB, byte_size, duration, numbered, share

DAY, YEAR = 86400.0, 365.25 * 86400.0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (1.5e-6, "1.5 µs"),
        (0.013, "13 ms"),
        (0.0688, "68.8 ms"),
        (0.9, "900 ms"),
        (1.2345, "1.23 s"),
        (81, "81 s"),
        (754, "13 min"),
        (2.5 * 60, "2.5 min"),
        (4.2 * 3600, "4.2 h"),
        (36 * 3600, "36 h"),
        (9.4 * DAY, "9.4 days"),
        (400 * DAY, "400 days"),
        (12 * YEAR, "12 years"),
        (4.84 * YEAR, "4.8 years"),
        (1234 * YEAR, "1,234 years"),
        (-3, "-3 s"),
        (float("inf"), "unknown"),
    ],
)
def test_a_duration_is_in_the_unit_of_its_length(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (3 << 10, "3 KiB"),
        (1.5 * 2**20, "1.5 MiB"),
        (0.34 * GIB, "348 MiB"),
        (75.13 * GIB, "75.1 GiB"),
        (1460.4 * GIB, "1,460 GiB"),
    ],
)
def test_a_size_is_in_the_unit_of_its_length(count: float, text: str) -> None:
    assert byte_size(count) == text


def test_what_is_needed_stands_before_what_there_is() -> None:
    assert share(int(75.13 * GIB), int(79.1 * GIB)) == "75.1 of 79.1 GiB"
    assert share(300 << 20, 2 * GIB) == "300 MiB of 2 GiB"


def test_a_single_rank_is_no_plural() -> None:
    assert [numbered("rank", it) for it in ([1], [0, 2, 3])] == ["rank 1", "ranks 0, 2 and 3"]
