"""All runs of a folder at a glance, for `nanoscale top`: from their directories alone."""

import math
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from nanoscale.common.errors import UserError
from nanoscale.common.units import GIB, byte_size, duration
from nanoscale.launch.batch.jobs import Job, jobs_of
from nanoscale.runs import jsonlines
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.documents import read_document
from nanoscale.runs.tail import read_end
from nanoscale.view.blocks import Column, Table, table
from nanoscale.view.run.run_table import row

Row = dict[str, Any]
_BARS = "▁▂▃▄▅▆▇█"
_POINTS = 16
"""The losses of a curve."""
_END_BYTES = 1 << 14
_ASK_S, _ALIVE_S = 15.0, 5.0
"""Seconds between two questions to SLURM, and between two looks whether a launcher lives."""


class RunsAtAGlance:
    """The rows of all runs of a folder; a run is read again if its files have changed."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._known: dict[Path, tuple[object, Row]] = {}
        self._jobs: dict[RunDirectory, Job] = {}
        self._asked = -math.inf

    def rows(self) -> list[Row]:
        """Return the rows, active runs first and then the newest."""
        runs, now = RunDirectory.all(self._root), time.monotonic()
        if now - self._asked > _ASK_S:
            self._jobs, self._asked = jobs_of(runs), now
        self._known = {run.path: self._current(run, now) for run in runs}
        found = [values for _, values in self._known.values()]
        return sorted(found, key=lambda it: (not it["in_progress"], -(it["created"] or 0)))

    def _current(self, run: RunDirectory, now: float) -> tuple[object, Row]:
        files = (run.status, run.metrics, run.events, run.config)
        job = self._jobs.get(run)
        version: tuple[object, ...] = (*map(_version, files), str(job))
        known = self._known.get(run.path)
        if known is not None and known[1]["state"] in ("prepared", "starting", "running"):
            version = (*version, now // _ALIVE_S)
        if known is not None and known[0] == version:
            return known
        return version, _read(run, job)


def _version(path: Path) -> tuple[int, int]:
    with suppress(OSError):
        about = path.stat()
        return about.st_mtime_ns, about.st_size
    return 0, 0


def _read(run: RunDirectory, job: Job | None) -> Row:
    records, events = _objects(run.metrics), _objects(run.events)
    losses = [_number(record.get("loss")) for record in records]
    last, event = (found[-1] if found else {} for found in (records, events))
    planned = None
    with suppress(OSError, UserError):
        planned = _number(read_document(run.plan).get("tokens_per_s"))
    values = row(run, job, [])
    left = (values["steps"] or 0) - (values["step"] or 0)
    seconds, message = _number(last.get("step_time_s")), event.get("message")
    return values | {
        "loss": _number(values["loss"]),
        "losses": [it for it in losses if it is not None][-_POINTS:],
        "tokens_per_s": _number(last.get("tokens_per_s")),
        "planned_tokens_per_s": planned,
        "goodput": _number(last.get("goodput")),
        "memory_gib": _number(last.get("memory_gib")),
        "eta_s": left * seconds if seconds and values["in_progress"] and left > 0 else None,
        "event": message if isinstance(message, str) and message else values["message"],
    }


def _objects(path: Path) -> list[Row]:
    """Return the objects at the end of a file; what is damaged hides no other run."""
    with suppress(OSError):
        return list(jsonlines.objects(read_end(path, _END_BYTES).splitlines()))
    return []


def _number(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number else None  # type: ignore[return-value]


def curve(losses: list[float]) -> str:
    """Return a curve in a line of text."""
    finite = [it for it in losses if math.isfinite(it)]
    if not finite:
        return ""
    low, span = min(finite), (max(finite) - min(finite)) or 1.0
    return "".join(_BARS[round(7 * (it - low) / span)] for it in finite)


def _speed(values: Row) -> str:
    speed, planned = values["tokens_per_s"], values["planned_tokens_per_s"]
    if speed is None:
        return ""
    return f"{speed:,.0f}{f' ({speed / planned:.0%})' if planned else ''}"


_COLUMNS = (
    Column("run", "name"),
    Column("state", lambda it: it["message"] or "?", is_text=True),
    Column("step", lambda it: f"{it['step'] or 0}/{it['steps'] or '?'}", optional=3),
    Column("loss", lambda it: "" if it["loss"] is None else f"{it['loss']:.4f}", optional=2),
    Column("curve", lambda it: curve(it["losses"]), is_text=True, optional=1),
    Column("tokens/s (of plan)", _speed),
    Column(
        "goodput", lambda it: "" if it["goodput"] is None else f"{it['goodput']:.1%}", optional=2
    ),
    Column("memory", lambda it: byte_size(int(GIB * it["memory_gib"])) if it["memory_gib"] else ""),
    Column("ETA", lambda it: duration(it["eta_s"]) if it["eta_s"] is not None else ""),
    Column("last event", "event", is_text=True, optional=1),
)


def top_table(rows: list[Row]) -> Table:
    return table(_COLUMNS, rows)
