"""The steps that `profile.steps` selects."""

from __future__ import annotations

import re

Steps = tuple[int, int]
"""The first and the last of a series of steps that is recorded as one."""

_SERIES = re.compile(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?")


def series_of(steps: int | str | list[int] | None) -> list[Steps]:
    """Return the series in their order; consecutive steps of a list are one series.

    Raises:
        ValueError: it is a text of another form, or counts backwards.
    """
    if steps is None:
        return []
    if isinstance(steps, int):
        return [(steps, steps)]
    if isinstance(steps, str):
        return [_series(steps)]
    found: list[Steps] = []
    for step in sorted(set(steps)):
        if found and found[-1][1] == step - 1:
            found[-1] = (found[-1][0], step)
        else:
            found.append((step, step))
    return found


def _series(text: str) -> Steps:
    match = _SERIES.fullmatch(text)
    if match is None:
        raise ValueError(text)
    first = int(match[1])
    last = int(match[2] or first)
    if not 1 <= first <= last:
        raise ValueError(text)
    return first, last
