"""The comparison of several runs, from their directories alone: a document, and tables and curves of it."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from nanoscale.common.json_text import Json
from nanoscale.common.units import duration
from nanoscale.config import reference
from nanoscale.config.composing.frozen import read_values
from nanoscale.config.violations import shown
from nanoscale.runs import metrics, status
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.jsonlines import Object
from nanoscale.runs.metrics import steady
from nanoscale.view.blocks import Block, Chart, Report, Table
from nanoscale.view.charts import Curve, curve_line, curves
from nanoscale.view.run.run_report import curve, figure, thinned

CURVES = ("loss", "eval_loss", "tokens_per_s")
_SHARES = (0.25, 0.5, 1.0)
"""The points of the common range at which losses are compared."""
_ROWS = {
    "state": "", "step": "", "tokens": "", "seconds": "s", "loss": "loss", "eval_loss": "loss",
    "step_time_s": "s", "tokens_per_s": "", "memory_gib": "GiB",
}  # fmt: skip
"""The values of each run and their units."""


def document(runs: Sequence[RunDirectory]) -> Json:
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


def _summary(run: RunDirectory, records: list[Object]) -> Json:
    *_, end = [{}, *_progress(records)]
    seen = steady(run)
    evaluated = [record["eval_loss"] for record in records if record.get("eval_loss") is not None]
    return {
        "name": run.name,
        "path": str(run.path),
        "state": status.require(run).state,
        **{name: end.get(name) for name in ("step", "tokens", "seconds", "loss")},
        "eval_loss": evaluated[-1] if evaluated else None,
        "step_time_s": seen.seconds,
        "tokens_per_s": seen.tokens_per_s,
        "memory_gib": seen.memory_gib,
    }


def _differing_keys(runs: Sequence[RunDirectory]) -> list[Json]:
    """List the configuration keys whose values differ, but for the name of the run."""
    names = [name for name in reference.declared() if name != "run.name"]
    configs = [read_values(run.config, names) for run in runs]
    values = {name: [config[name] for config in configs] for name in names}
    return [
        {"key": name, "values": its}
        for name, its in values.items()
        if any(value != its[0] for value in its)
    ]


def _progress(records: list[Object]) -> Iterator[Json]:
    """Yield step, tokens, seconds of training and loss of each record; pauses between attempts do not count."""
    seconds, before = 0.0, 0
    for record in records:
        seconds += (record.get("step_time_s") or 0.0) * (record["step"] - before)
        before = record["step"]
        chosen = {name: record.get(name) for name in ("step", "tokens", "loss")}
        yield {**chosen, "seconds": seconds}


def _losses(runs: list[list[Json]]) -> Iterator[Json]:
    """Yield the losses at steps and tokens that all runs have logged, and at equal times."""
    for axis in ("step", "tokens"):
        logged = [{it[axis]: it["loss"] for it in run if it[axis] is not None} for run in runs]
        common = sorted(set.intersection(*map(set, logged)))
        last = common[-1] if common else 0
        points = (
            max((at for at in common if at <= share * last), default=None) for share in _SHARES
        )
        for at in dict.fromkeys(point for point in points if point is not None):
            yield {"axis": axis, "at": at, "losses": [losses[at] for losses in logged]}
    shortest = min(run[-1]["seconds"] if run else 0.0 for run in runs)
    for at in (shortest * share for share in _SHARES if shortest):
        losses = [_loss_after(run, at) for run in runs]
        if any(loss is not None for loss in losses):
            yield {"axis": "seconds", "at": at, "losses": losses}


def _loss_after(run: list[Json], seconds: float) -> float | None:
    """Return the loss after a time, on the line between the logged losses before and after it."""
    known = [(it["seconds"], it["loss"]) for it in run if it["loss"] is not None]
    for (before, first), (after, second) in pairwise(known):
        if before <= seconds <= after * (1 + 1e-9) and after > before:
            share = min(1.0, (seconds - before) / (after - before))
            return float(first + share * (second - first))
    return None


# --- the screen and the page ----------------------------------------------------------------------


def comparison_report(about: Json) -> Report:
    names = [run["name"] for run in about["runs"]]
    return Report(f"comparison of {', '.join(names)}", list(_blocks(about, names)))


def _blocks(about: Json, names: Sequence[str]) -> Iterator[Block]:
    figures = [
        (name, *(_figure(run[name], unit) for run in about["runs"])) for name, unit in _ROWS.items()
    ]
    tables = {
        "": [row for row in figures if any(row[1:])],
        "keys that differ": [(it["key"], *map(shown, it["values"])) for it in about["keys"]],
        "losses": [
            (f"loss at {_point(row)}", *(_figure(loss, "loss") for loss in row["losses"]))
            for row in about["losses"]
        ],
    }
    for title, rows in tables.items():
        if rows:
            yield Table(("", *names), rows, title)
    for metric, series in about["curves"].items():
        curve = curves(metric, list(zip(names, series, strict=True)), width=960, height=320)
        yield Chart(partial(_curve_lines, metric, names, series), [curve])


def _curve_lines(metric: str, names: Sequence[str], series: Sequence[Curve], width: int) -> str:
    columns = max(20, min(width, 100) - 40)
    known = [value for points in series for _, value in points if value is not None]
    scale = (min(known), max(known)) if known else None
    longest = max(points[-1][0] for points in series if points)
    lines = [
        curve_line(name, points, max(1, round(columns * points[-1][0] / longest)), scale)
        for name, points in zip(names, series, strict=True)
        if points
    ]
    return "".join(f"{line}\n" for line in [metric, *lines])


def _point(row: Json) -> str:
    if row["axis"] == "seconds":
        return duration(row["at"])
    return f"step {row['at']:,}" if row["axis"] == "step" else f"{row['at']:,} tokens"


def _figure(value: Any, unit: str) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:.4f}" if unit == "loss" else figure(value, unit)
