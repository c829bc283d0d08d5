"""metrics.jsonl: one object per logged step. Rank 0 writes it, everybody may read it."""

from __future__ import annotations

from nanoscale.runs import jsonlines
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.jsonlines import Object, Tail


def read(run: RunDirectory) -> list[Object]:
    """Every whole line so far; a torn last line is not one."""
    return jsonlines.read(run.metrics)


def follow(run: RunDirectory) -> Tail:
    """A reader whose `poll()` gives the objects that were added since it last did."""
    return Tail(run.metrics)


def last(run: RunDirectory) -> Object | None:
    """The newest logged step."""
    records = jsonlines.read_end(run.metrics)
    return records[-1] if records else None
