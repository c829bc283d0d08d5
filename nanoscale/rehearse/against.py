"""The changes of a rehearsal since a former one of the same layout: calls, bytes, memory, work. Torch-free."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from nanoscale.common.errors import UserError
from nanoscale.common.json_text import Json
from nanoscale.common.units import byte_size, duration
from nanoscale.runs.documents import damaged, read_record

_LAYOUT = ("model", "world_size", "degrees", "schedule", "zero", "device", "steps", "micro_batches")


@dataclass(frozen=True)
class _Former:
    """The document of a former rehearsal, as `--json` prints it, or as a run's program.json."""

    model: str
    world_size: int
    degrees: dict[str, int]
    schedule: str | None
    zero: int
    device: str
    steps: int
    micro_batches: int
    worst_rank: int
    collectives: list[Json]
    ranks: list[Json]
    streams: Json = field(default_factory=dict)


def read_former(file: Path) -> Json:
    """Return a former rehearsal.

    Raises:
        UserError: the file cannot be read, or holds something else.
    """
    try:
        return vars(read_record(_Former, file))
    except OSError as error:
        raise UserError("usage", f"--against {file}: {error.strerror}") from error


def changes(result: Json, former: Json, file: Path) -> list[str]:
    """Return the differences of a rehearsal from a former one, which was read from a file, as sentences.

    Raises:
        UserError: the former one is of another layout, or is not whole.
    """
    other = [name for name in _LAYOUT if former[name] != result[name]]
    if other:
        texts = [f"{name} {former[name]} in place of {result[name]}" for name in other]
        raise UserError("usage", f"--against {file}: is of another job: {'; '.join(texts)}")
    try:
        return [*_differences(former, result)]
    except (KeyError, TypeError, StopIteration) as error:
        raise damaged(file, "is not a whole document of a rehearsal") from error


def _rank(document: Json, which: str) -> Json:
    return next(rank for rank in document["ranks"] if rank["rank"] == document[which])


def _times(former: Json | None, result: Json | None) -> Iterator[str]:
    """Yield the time of the slowest rank's step, and what is exposed of each axis, if they have changed."""
    if former is None or result is None:
        return
    one, other = (_rank(each, "slowest_rank") for each in (former, result))
    rows = [("step", one["seconds"], other["seconds"])]
    for axis in sorted({*one["exposed"], *other["exposed"]}):
        before, now = (each["exposed"].get(axis, 0.0) for each in (one, other))
        rows.append((f"exposed {axis}", before, now))
    for name, before, now in rows:
        if duration(before) != duration(now):
            yield f"{name} {duration(before)} → {duration(now)}"


def _differences(former: Json, result: Json) -> Iterator[str]:
    before, now = (
        {(row["axis"], row["kind"]): (row["count"], row["bytes"]) for row in each["collectives"]}
        for each in (former, result)
    )
    for axis, kind in sorted({*before, *now}):
        one, other = (each.get((axis, kind), (0, 0)) for each in (before, now))
        if one != other:
            calls = f"{one[0]:,} calls of {byte_size(one[1])}"
            yield f"{axis}: {kind}: {other[0]:,} calls of {byte_size(other[1])} a step, before {calls}"
    yield from _times(former.get("time"), result.get("time"))
    of_worst: dict[str, tuple[str, Callable[[int], str]]] = {
        "allocated": ("the peak of tensors is", byte_size),
        "operations": ("operations of a step:", "{:,}".format),
    }
    for name, (text, shown) in of_worst.items():
        one, other = (_rank(each, "worst_rank")[name] for each in (former, result))
        if one != other:
            yield f"{text} {shown(other)}, before {shown(one)}"
