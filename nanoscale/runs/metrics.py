"""The file metrics.jsonl: one object per logged step. Rank 0 writes it, everybody may read it."""

from __future__ import annotations

from nanoscale.runs import jsonlines
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.documents import damaged
from nanoscale.runs.jsonlines import Object, Tail

NAMES = (
    "step", "time", "loss", "grad_norm", "lr", "tokens", "step_time_s", "tokens_per_s", "mfu", "memory_gib",
    "eval_loss", "loss_scale", "skipped_steps", "moe_imbalance",
)  # fmt: skip
"""The metrics that any run may have; evaluations of several data sets add `eval_loss/NAME`."""


def read(run: RunDirectory) -> list[Object]:
    """Return every complete line so far, without a torn last line.

    Raises:
        UserError: the file is damaged.
    """
    return [_checked(run, record) for record in jsonlines.read(run.metrics)]


def follow(run: RunDirectory) -> Tail:
    """Return a reader whose `poll()` returns the objects added since the previous call."""
    return Tail(run.metrics)


def last(run: RunDirectory, name: str | None = None) -> Object | None:
    """Return the newest logged step, or the newest that has a metric."""
    record = jsonlines.last(run.metrics, name)
    return None if record is None else _checked(run, record)


def _checked(run: RunDirectory, record: Object) -> Object:
    """Return a record of numbers; null stands for a number that is not finite."""
    if type(record.get("step")) is not int:
        raise damaged(run.metrics, "has a record without a `step`")
    return {name: value if _is_number(value) else None for name, value in record.items()}


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
