"""The comparison of several runs, from their directories alone: a JSON document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from nanoscale.config import reference
from nanoscale.config.composing.frozen import read_values
from nanoscale.runs import metrics, status
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.jsonlines import Object
from nanoscale.runs.metrics import steady
from nanoscale.view.run.run_report import curve, thinned

Document = dict[str, Any]
CURVES = ("loss", "eval_loss", "tokens_per_s")
_SHARES = (0.25, 0.5, 1.0)
"""The points of the common range at which losses are compared."""


def document(runs: Sequence[RunDirectory]) -> Document:
    """Return the whole comparison; unknown values are null. Lists are in the order of the runs."""
    logged = [metrics.read(run) for run in runs]
    return {
        "runs": [_summary(run, records) for run, records in zip(runs, logged, strict=True)],
        "keys": _differing_keys(runs),
        "losses": list(_losses([list(_progress(records)) for records in logged])),
        "curves": {
            name: [thinned(curve(records, name)) for records in logged]
            for name in CURVES
            if any(name in record for records in logged for record in records)
        },
    }


def _summary(run: RunDirectory, records: list[Object]) -> Document:
    *_, end = [{}, *_progress(records)]
    seen = steady(run)
    evaluated = [record["eval_loss"] for record in records if record.get("eval_loss") is not None]
    return {
        "name": run.name,
        "path": str(run.path),
        "state": status.require(run).state,
        "step": end.get("step"),
        "tokens": end.get("tokens"),
        "seconds": end.get("seconds"),
        "loss": end.get("loss"),
        "eval_loss": evaluated[-1] if evaluated else None,
        "step_time_s": seen.seconds,
        "tokens_per_s": records[-1].get("tokens_per_s") if records else None,
        "memory_gib": seen.memory_gib,
    }


def _differing_keys(runs: Sequence[RunDirectory]) -> list[Document]:
    """List the configuration keys whose values differ, but for the name of the run."""
    names = [name for name in reference.declared() if name != "run.name"]
    configs = [read_values(run.config, names) for run in runs]
    values = {name: [config[name] for config in configs] for name in names}
    return [
        {"key": name, "values": its}
        for name, its in values.items()
        if any(value != its[0] for value in its)
    ]


def _progress(records: list[Object]) -> Iterator[Document]:
    """Yield step, tokens, seconds of training and loss of each record; pauses between attempts do not count."""
    seconds, before = 0.0, 0
    for record in records:
        seconds += (record.get("step_time_s") or 0.0) * (record["step"] - before)
        before = record["step"]
        chosen = {name: record.get(name) for name in ("step", "tokens", "loss")}
        yield {**chosen, "seconds": seconds}


def _losses(runs: list[list[Document]]) -> Iterator[Document]:
    """Yield the losses at equal steps, tokens and times, up to where the shortest run has come."""
    for axis in ("step", "tokens", "seconds"):
        ends = [max((it[axis] for it in run if it[axis] is not None), default=0) for run in runs]
        for share in _SHARES if min(ends) else ():
            at = min(ends) * share
            at = at if axis == "seconds" else max(1, int(at))
            yield {"axis": axis, "at": at, "losses": [_loss_at(run, axis, at) for run in runs]}


def _loss_at(run: list[Document], axis: str, at: float) -> float | None:
    """Return the last loss that was logged up to a point."""
    reached = [it["loss"] for it in run if it[axis] is not None and it[axis] <= at * (1 + 1e-9)]
    return reached[-1] if reached else None
