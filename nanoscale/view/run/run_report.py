"""The report of a run, from its directory alone: a JSON document, from which the pages are made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nanoscale.config.composing.frozen import load
from nanoscale.config.data.token_sources import times_seen
from nanoscale.config.hardware.data_sheets import kind
from nanoscale.config.hardware.usual_mfu import usual_mfu
from nanoscale.config.model_math import parameters
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.launch.lifecycle.command import read_plan
from nanoscale.runs import events, failure, metrics, status
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.documents import damaged, read_document
from nanoscale.runs.jsonlines import Object
from nanoscale.runs.metrics import Steady, steady
from nanoscale.view.charts import Curve

CURVES = ("loss", "eval_loss", "grad_norm", "lr", "tokens_per_s")
MOST_POINTS = 600
"""The most points of a curve."""
Document = dict[str, Any]


def document(run: RunDirectory) -> Document:
    """Return the whole report; unknown values are null. Times are UNIX seconds, sizes GiB."""
    now, records, happened = status.require(run), metrics.read(run), events.read(run)
    cause, config = failure.read(run), load(run.config)
    return {
        "run": run.name,
        "path": str(run.path),
        "state": now.state,
        "exit_code": now.exit_code,
        "created": now.created,
        "started": now.started,
        "ended": now.ended,
        "what": what(config),
        "hosts": _hosts(run),
        "attempts": list(_attempts(happened)),
        "failure": failure.document(cause) if cause else None,
        "step": max((int(record["step"]) for record in records), default=0),
        "steps": config.train.steps,
        "first": records[0] if records else None,
        "last": records[-1] if records else None,
        "against_plan": against_plan(run, config, steady(run)),
        "usual_mfu": usual_mfu(config) if config.launcher.device == "cuda" else None,
        "checkpoints": _checkpoints(run, happened),
        "curves": {name: thinned(curve(records, name)) for name in CURVES},
    }


def what(config: ResolvedConfig) -> Document:
    """Describe the job in a few values."""
    layout = config.parallel
    return {
        "model": config.model.name,
        "parameters": parameters(config.model),
        "precision": kind(config.precision),
        "backend": config.backend.name,
        "device": config.launcher.device,
        "world_size": config.world_size,
        "layout": {
            name: getattr(layout, name) for name in ("dp", "dp_replicate", "tp", "pp", "cp", "ep")
        },
        "schedule": layout.schedule if layout.pp > 1 else None,
        "zero_stage": config.zero.stage,
        "recompute": layout.activation_checkpointing,
        "global_batch": config.train.global_batch,
        "micro_batch": config.train.micro_batch,
        "accumulation": config.accumulation,
        "seq_len": config.train.seq_len,
        "tokens_per_step": config.tokens_per_step,
        "data": config.data.source,
        "epochs": times_seen(config),
        "optimizer": config.optimizer.name,
    }


def against_plan(run: RunDirectory, config: ResolvedConfig, seen: Steady) -> list[Document]:
    """Compare prediction and measurement of steady steps; empty if this layout was not planned."""
    plan = prediction(run)
    if plan is None:
        return []
    try:
        if any(getattr(config.parallel, name) != degree for name, degree in plan["layout"].items()):
            return []
        on_cpu = plan["hardware"]["device"] == "cpu"
        rows = [
            ("step time", "s", plan["step_time_s"], seen.seconds),
            ("tokens/s", "", plan["tokens_per_s"], _per_second(config, seen)),
            ("MFU", "%", 100 * plan["mfu"], _mfu(run)),
            (
                "memory allocated",
                "GiB",
                plan["memory"]["allocated_gib"],
                None if on_cpu else seen.memory_gib,
            ),
        ]
        if on_cpu:  # the measurement covers a process with its libraries, which is not predicted
            rows.append(("memory of a process", "GiB", None, seen.memory_gib))
    except (KeyError, TypeError, AttributeError) as error:
        raise damaged(run.plan, "is not a plan of nanoscale") from error
    return [
        {
            "what": name,
            "unit": unit,
            "predicted": predicted,
            "measured": measured,
            "error": predicted / measured - 1 if measured and predicted is not None else None,
        }
        for name, unit, predicted, measured in rows
    ]


def prediction(run: RunDirectory) -> Document | None:
    """Return the prediction of the run; None if there is none.

    Raises:
        UserError: plan.json is damaged.
    """
    try:
        return read_document(run.plan)
    except FileNotFoundError:
        return None


def _per_second(config: ResolvedConfig, seen: Steady) -> float | None:
    return config.tokens_per_step / seen.seconds if seen.seconds else None


def _mfu(run: RunDirectory) -> float | None:
    """Return the MFU in percent, of the steady steps; it is proportional to the speed."""
    last, seen = metrics.last(run), steady(run)
    if last is None or not last.get("mfu") or not last.get("step_time_s") or not seen.seconds:
        return None
    return 100.0 * float(last["mfu"]) * float(last["step_time_s"]) / seen.seconds


def _hosts(run: RunDirectory) -> list[Document]:
    plan = read_plan(run)
    return [{"host": host.host, "ranks": len(host.ranks)} for host in plan.hosts] if plan else []


def _attempts(happened: list[Object]) -> Iterator[Document]:
    """Yield the attempts: the step before the first, the ranks, and the end as the ranks report it."""
    current: Document | None = None
    for event in happened:
        kind = event.get("kind")
        if kind == "attempt":
            if current is not None:
                yield current
            current = {
                "attempt": event.get("attempt"),
                "time": event.get("time"),
                "world_size": event.get("world_size"),
                "after_step": 0,
                "end": None,
            }
        elif current is not None and kind == "resumed":
            current["after_step"] = int(event.get("step", 0))
        elif current is not None and kind in ("end", "failure", "restart"):
            current["end"] = str(event.get("message", ""))
    if current is not None:
        yield current


def _checkpoints(run: RunDirectory, happened: list[Object]) -> list[Document]:
    """List the existing checkpoints, with the time and duration of their saving if an event has them."""
    saved = {event.get("step"): event for event in happened if event.get("kind") == "checkpoint"}
    return [
        {
            "step": step,
            "path": str(run.checkpoint(step)),
            "time": saved.get(step, {}).get("time"),
            "seconds": saved.get(step, {}).get("seconds"),
        }
        for step in run.checkpoint_steps()
    ]


def curve(records: list[Object], name: str) -> Curve:
    """Return a metric over the steps that have it."""
    return [(int(record["step"]), record[name]) for record in records if name in record]


def thinned(points: Curve) -> Curve:
    """Return at most `MOST_POINTS` points: the lowest and the highest of each segment, so no spike is lost."""
    stretch = -(-len(points) // (MOST_POINTS // 2))
    if len(points) <= MOST_POINTS:
        return points
    kept: set[int] = {0, len(points) - 1}
    for start in range(0, len(points), stretch):
        places = range(start, min(start + stretch, len(points)))
        kept |= {
            min(places, key=lambda i: _size(points[i])),
            max(places, key=lambda i: _size(points[i])),
        }
    return [points[i] for i in sorted(kept)]


def _size(point: tuple[int, float | None]) -> float:
    return float("inf") if point[1] is None else point[1]
