"""The file metrics.jsonl: one object per logged step. Rank 0 writes it, everybody may read it."""

from __future__ import annotations

from nanoscale.runs import jsonlines
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.documents import damaged
from nanoscale.runs.jsonlines import Object, Tail


def read(run: RunDirectory) -> list[Object]:
    """Return every complete line so far, without a torn last line.

    Raises:
        UserError: the file is damaged.
    """
    return [_checked(run, record) for record in jsonlines.read(run.metrics)]


def follow(run: RunDirectory) -> Tail:
    """Return a reader whose `poll()` returns the objects added since the previous call."""
    return Tail(run.metrics)


def last(run: RunDirectory) -> Object | None:
    """Return the newest logged step."""
    records = jsonlines.read_end(run.metrics)
    return _checked(run, records[-1]) if records else None


def _checked(run: RunDirectory, record: Object) -> Object:
    """Return a record of numbers; null stands for a number that is not finite."""
    if type(record.get("step")) is not int:
        raise damaged(run.metrics, "has a record without a `step`")
    return {name: value if _is_number(value) else None for name, value in record.items()}


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
