"""The result of a rehearsal as one JSON document, for people, programs and program.json. Torch-free."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from nanoscale.common.json_text import Json
from nanoscale.common.versions import missing
from nanoscale.config.layout import axis_of
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.rehearse.compare import compared_groups, mismatches
from nanoscale.rehearse.played.record import RankRecord


def document(
    config: ResolvedConfig,
    records: Sequence[RankRecord],
    stands_for: dict[int, int],
    steps: int,
    gpu: Json | None,
    context: int,
) -> Json:
    """Return the document.

    Args:
        stands_for: the number of ranks that each played rank stands for.
        gpu: the fields of `rehearse.played.cuda.Gpu`; None for CPUs.
        context: bytes of a GPU that are not PyTorch's.
    """
    parallel = config.parallel
    degrees = {"pp": parallel.pp, "dp": parallel.dp, "cp": parallel.cp, "tp": parallel.tp}
    ranks = [_rank(record, stands_for[record.rank], context) for record in records]
    name, capacity = (gpu["name"], gpu["memory"]) if gpu is not None else (None, None)
    worst = max(ranks, key=lambda rank: int(rank["total"]))
    compared, groups = compared_groups(records)
    eager = config.backend.compile == "on" and bool(missing("triton"))
    fits = None if capacity is None else worst["total"] <= capacity
    return {
        "model": config.model.name,
        "world_size": config.world_size,
        "degrees": {**degrees, "ep": parallel.ep},
        "schedule": parallel.schedule if parallel.pp > 1 else None,
        "zero": config.zero.stage,
        "device": name or "cpu",
        "steps": steps,
        "micro_batches": config.accumulation,
        "capacity": capacity,
        "worst_rank": worst["rank"],
        "fits": None if eager and not fits else fits,  # an upper bound proves only that a job fits
        "mismatches": mismatches(records, lambda group: axis_of(group, degrees) == "cp"),
        "compared_groups": compared,
        "groups": groups,
        "eager": eager,
        "compiled": {
            "gpu": name,
            "target": records[0].target or None,
            "kernels": _kernels(records),
        },
        "compiler": list(dict.fromkeys(it for record in records for it in record.compiler)),
        "notes": _notes(config, records),
        "not_played": _not_played(config, records, steps),
        "collectives": _totals(records, degrees, steps),
        "ranks": ranks,
        "program": {str(record.rank): _program(record) for record in records},
        "streams": {str(record.rank): _streams(record) for record in records},
    }


def _kernels(records: Sequence[RankRecord]) -> list[Json]:
    """Return the compiled kernels of the played ranks, each once, those with most bytes in a step first."""
    kernels = {(it["name"], it["bytes"]): it for record in records for it in record.kernels}
    return sorted(kernels.values(), key=lambda it: -int(it["times"] * it["bytes"]))


def failed(result: Json) -> bool:
    """True if the code of a rank failed, ranks disagree, or a rank made a mistake."""
    ranks = result["ranks"]
    return bool(result["mismatches"]) or any(rank["error"] or rank["findings"] for rank in ranks)


def _notes(config: ResolvedConfig, records: Sequence[RankRecord]) -> list[str]:
    notes = list(dict.fromkeys(note for record in records for note in record.notes))
    if config.model.experts:
        notes.append("loads of experts are made up: every expert gets nearly as many tokens")
    if config.backend.compile == "on" and (needed := missing("triton")):
        notes.append(f"not compiled, so the memory is an upper bound: this needs {needed}")
    return notes


def _not_played(config: ResolvedConfig, records: Sequence[RankRecord], steps: int) -> list[str]:
    """Return what ranks do in the job and do not do in the rehearsal."""
    train, checkpoint = config.train, config.checkpoint
    batches = records[0].repeated
    where = "at its end" if config.parallel.pp > 1 else "in its middle"
    where += " (--micro-batches all plays them)"
    middle = config.world_size - len(records)
    saves = bool(checkpoint.every or checkpoint.every_minutes or checkpoint.at_end)
    names = {
        "the passes of the teacher": train.is_distilled,
        "on_checkpoint() of hooks.path, if the file has it": saves and bool(config.hooks.path),
        "evaluation tasks": bool(train.eval_tasks and train.eval_every),
        "the writing of checkpoints by torch.distributed.checkpoint": saves,
        "the rollback after a jump of the loss": train.on_spike == "rollback",
        "the statistics of layers": train.statistics_every > steps,
        "the phases after the first one": len(train.phases) > 1,
        f"{batches:,} of {config.accumulation:,} micro batches of a step, {where}": batches > 0,
        f"{middle:,} of {config.world_size:,} ranks, which are of played kinds": middle > 0,
    }
    return [name for name, has in names.items() if has]


def _rank(record: RankRecord, stands_for: int, context: int) -> Json:
    names = (
        "rank",
        "peak_phase",
        "operations",
        "checkpoint",
        "findings",
        "error",
        "seconds",
        "timeline",
    )
    return {
        **{name: getattr(record, name) for name in names},
        "stands_for": stands_for,
        "allocated": record.peak,
        "reserved": max(record.reserved, record.peak),
        "context": context,
        "total": max(record.reserved, record.peak) + context,
        "phases": {name: vars(phase) for name, phase in record.phases.items()},
        "after_steps": record.after,
        "host": record.host_peak,
        "waits": [wait._asdict() for wait in record.waits],
    }


def _totals(records: Sequence[RankRecord], degrees: dict[str, int], steps: int) -> list[Json]:
    """Return, for each axis and kind, the collectives of the last step of the rank with most of them."""
    most: dict[Any, Json] = {}
    for record in records:
        counted: defaultdict[Any, Json] = defaultdict(lambda: {"count": 0, "bytes": 0})
        axes = [axis_of(group, degrees) for group in record.groups]
        for call in record.calls:
            if call.phase == f"step {steps}":
                total = counted[axes[call.group], call.kind.strip("_")]
                total["ranks"] = len(record.groups[call.group])
                total["count"] += call.repeat
                total["bytes"] += call.repeat * call.bytes
        for key, total in counted.items():
            if key not in most or total["bytes"] > most[key]["bytes"]:
                most[key] = {**total, "rank": record.rank}
    return [{"axis": axis, "kind": kind, **total} for (axis, kind), total in sorted(most.items())]


def _streams(record: RankRecord) -> Json:
    """Return the events of a rank's streams in the last step, for its time (`plan.rehearsed`)."""
    first, end = record.step_events
    called = sorted({it.of for it in record.events[first:end] if it.what == "call"})
    numbers = {call: number for number, call in enumerate(called)}
    events = []
    for stream, what, of in record.events[first:end]:
        new = numbers.get(of, -1) if what in ("call", "wait") else of - first * (what == "after")
        # What has ended before the step takes no time.
        events.append((stream, what, new) if new >= 0 else (stream, "batch", 0))
    names = ("kind", "bytes", "peer", "sent", "received", "line", "block")
    calls = [
        {"ranks": record.groups[record.calls[it].group]}
        | {name: getattr(record.calls[it], name) for name in names}
        for it in called
    ]
    return {"works": record.works, "segments": record.segments, "events": events, "calls": calls}


def _program(record: RankRecord) -> Json:
    """Return the collectives of a rank in order, column by column."""
    names = ("kind", "group", "bytes", "dtype", "peer", "phase", "repeat", "block", "line")
    return {
        "groups": record.groups,
        **{name: [getattr(call, name) for call in record.calls] for name in names},
    }
