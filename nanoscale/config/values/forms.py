"""Values whose texts have a form of their own: `launcher.nodes`, `profile.steps` and `run.name`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from nanoscale.common.errors import Violation

if TYPE_CHECKING:  # completion reads names of runs, and no YAML
    from nanoscale.config.values.provenance import Composed

# --- launcher.nodes: the number of hosts ----------------------------------------------------------

_RANGE = re.compile(r"([0-9]{1,6})(?::([0-9]{1,6}))?")


def node_range(nodes: int | str | None) -> tuple[int, int] | None:
    """Return the fewest and the most hosts; the same number twice if the job is not elastic.

    Raises:
        ValueError: neither `N` nor `MIN:MAX`; its text is the rule, to follow the key.
    """
    if nodes is None:
        return None
    parts = _RANGE.fullmatch(str(nodes).strip())
    if parts is None:
        raise ValueError("must be a number of hosts, N, or MIN:MAX")
    fewest, most = int(parts[1]), int(parts[2] or parts[1])
    if fewest < 1:
        raise ValueError("must be at least 1")
    if fewest > most:
        raise ValueError("has a MIN that is more than its MAX")
    return fewest, most


def elastic(nodes: int | str | None) -> bool:
    """True if the job continues with fewer hosts; False if `nodes` is not a legal value."""
    try:
        span = node_range(nodes)
    except ValueError:
        return False
    return span is not None and span[0] < span[1]


def nodes_violation(composed: Composed) -> Violation | None:
    """Return a violation of `launcher.nodes`, if there is one."""
    nodes, key = composed.config.launcher.nodes, "launcher.nodes"
    try:
        node_range(nodes)
    except ValueError as law:
        advice: tuple[str, ...] = ()
        parts = [part for part in re.split(r"[^0-9A-Za-z]+", str(nodes)) if part]
        if 1 <= len(parts) <= 2 and all(part.isdecimal() and len(part) < 7 for part in parts):
            # likely meanings: `2-4`, `2..4` and `4:2` mean a range, and 0 the fewest
            numbers = sorted(max(1, int(part)) for part in parts)
            advice = (f"{key}={':'.join(map(str, numbers))}",)
        return composed.violation(key, str(law), *advice)
    return None


# --- profile.steps --------------------------------------------------------------------------------

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
        match = _SERIES.fullmatch(steps)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= first <= last:
            raise ValueError(steps)
        return [(first, last)]
    series: list[Steps] = []
    for step in sorted(set(steps)):
        if series and series[-1][1] == step - 1:
            series[-1] = (series[-1][0], step)
        else:
            series.append((step, step))
    return series


# --- run.name -------------------------------------------------------------------------------------

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
