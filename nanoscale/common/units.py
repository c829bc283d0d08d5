"""Durations, times, sizes and numbers as texts: `13 ms`, `4.2 h`, `348 MiB`, `1,460 GiB`, `2 steps`."""

import math
import time
from collections.abc import Sequence

GIB = 2**30

_SHORT = ((1e-3, 1e-6, "µs"), (1.0, 1e-3, "ms"), (120.0, 1.0, "s"))
"""The seconds below which a unit is used, its length in seconds and its name."""
_LONG = (
    (120 * 60.0, 60.0, "min"),
    (48 * 3600.0, 3600.0, "h"),
    (2 * 365.25 * 86400.0, 86400.0, "days"),
    (math.inf, 365.25 * 86400.0, "years"),
)
"""The same for durations that need less than three digits."""


def duration(seconds: float) -> str:
    """Return a duration in the unit that suits its length."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds <= 0:
        return "0 s" if seconds == 0 else f"-{duration(-seconds)}"
    for limit, unit, name in _SHORT:
        if seconds < limit:
            return f"{three_digits(seconds / unit)} {name}"
    unit, name = next((unit, name) for limit, unit, name in _LONG if seconds < limit)
    value = seconds / unit
    return f"{value:,.0f} {name}" if value >= 10 else f"{value:.2g} {name}"


def clock(seconds: float | None) -> str:
    """Return a UNIX time as local date and time; `?` if it is not known."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds else "?"


def byte_size(count: float) -> str:
    """Return a number of bytes in B, KiB, MiB or GiB."""
    for limit, name in ((GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(count) >= limit:
            return f"{three_digits(count / limit)} {name}"
    return f"{count:.0f} B"


def share(needed: int, capacity: int) -> str:
    """Return the used part of a device's capacity: `77.3 of 79.1 GiB`."""
    texts = byte_size(needed), byte_size(capacity)
    (number, unit), (_, other) = (text.split() for text in texts)
    return f"{number} of {texts[1]}" if unit == other else " of ".join(texts)


def three_digits(value: float) -> str:
    """Return a number with three significant digits, or with all digits before its point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def counted(number: int, noun: str) -> str:
    """Return `1 step`, `2 steps`."""
    return f"{number} {noun}" if number == 1 else f"{number:,} {noun}s"


def numbered(noun: str, numbers: Sequence[object]) -> str:
    """Return `rank 1`, `ranks 1 and 2`."""
    return f"{noun}{'s' * (len(numbers) > 1)} {listed(list(map(str, numbers)))}"


def listed(words: list[str]) -> str:
    """Join texts: `a`, `a and b`, `a, b and c`."""
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def number(value: float | None, form: str) -> str:
    """Format a metric; null in metrics.jsonl means that it is not finite."""
    return "not finite" if value is None else format(value, form)
