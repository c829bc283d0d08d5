"""The file events.jsonl: the events of a run, one line each, from the launcher, the agent and rank 0."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from nanoscale.common.errors import UserError
from nanoscale.runs import jsonlines
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.jsonlines import Object

Note = Callable[..., None]
"""A function that records an event of the run, from rank 0 only: `note(kind, message, **fields)`."""
ATTEMPT = "attempt"
"""The kind of the event that begins an attempt."""
_KEPT: dict[Path, list[Object]] = {}
"""Events that the disk has not taken, by file; several threads of the launcher record events."""
_LOCK = threading.Lock()
STOP = "stop"
"""The kind of the event that `nanoscale runs stop` records before it sends a signal."""


def append(run: RunDirectory, kind: str, message: str, **fields: Any) -> None:
    """Record an event now; `fields` are stored in addition to `time`, `kind` and `message`.

    An event that cannot be written, as while the disk is full, is kept, and written before the next one.
    """
    with _LOCK, suppress(OSError):
        kept = _KEPT.setdefault(run.events, [])
        kept.append({"time": time.time(), "kind": kind, "message": message, **fields})
        while kept:
            jsonlines.append(run.events, kept[0])
            kept.pop(0)


def read(run: RunDirectory) -> list[Object]:
    """Return all events so far, the oldest first, each with a `time`, a `kind` and a `message`.

    Raises:
        UserError: the file is damaged.
    """
    return [_with_types(event) for event in jsonlines.read(run.events)]


_TYPES: dict[str, tuple[tuple[type, ...], Any]] = {
    "time": ((int, float), 0.0),
    "kind": ((str,), "?"),
    "message": ((str,), ""),
}
"""The types of the fields of every event, and the default for a missing one."""


def _with_types(event: Object) -> Object:
    """Return an event in which all fields that readers rely on have their types."""
    numbers = {name: event[name] for name in ("step", "attempt") if type(event.get(name)) is int}
    others = {name: value for name, value in event.items() if name not in ("step", "attempt")}
    return {**others, **numbers} | {
        name: event[name] if isinstance(event.get(name), types) else default
        for name, (types, default) in _TYPES.items()
    }


def stop_requested(run: RunDirectory) -> bool:
    """True if `nanoscale runs stop` was typed since the newest attempt began; False if the file is damaged."""
    recorded: list[Object] = []
    with suppress(UserError):
        recorded = read(run)
    kinds = (event.get("kind") for event in reversed(recorded))
    return next((kind for kind in kinds if kind in (ATTEMPT, STOP)), None) == STOP


def starts(run: RunDirectory) -> dict[int, int]:
    """Return the number of each attempt and the step that it continued from, in their order."""
    attempt, steps = 0, dict[int, int]()
    for event in read(run):
        if event["kind"] == ATTEMPT:
            attempt = event.get("attempt", attempt + 1)
            steps[attempt] = 0
        elif event["kind"] == "resumed":
            steps[attempt] = event.get("step", 0)
    return steps


def last(run: RunDirectory, kind: str) -> Object | None:
    """Return the newest event of a kind."""
    return next((event for event in reversed(read(run)) if event.get("kind") == kind), None)
