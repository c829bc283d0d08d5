"""A replay compared with what the run recorded: a document, and sentences."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from nanoscale.checkpoint.store import find_checkpoint
from nanoscale.common.units import counted
from nanoscale.launch.lifecycle.repetition import Replay
from nanoscale.processes.proc import ranges
from nanoscale.runs import metrics
from nanoscale.runs.directory import RunDirectory

_FIGURES = ("loss", "grad_norm", "eval_loss")


def document(replay: Replay, replayed: RunDirectory, tolerance: float) -> dict[str, Any]:
    """Return the comparison of recorded and replayed losses, gradient norms and tensors.

    Args:
        tolerance: the relative difference that still counts as equal.
    """
    start = replay.start_step
    replayed_steps = {it["step"]: it for it in metrics.read(replayed) if it["step"] > start}
    recorded = {record["step"]: record for record in metrics.read(replay.run)}
    steps = [
        {
            "step": step,
            **{
                name: {"recorded": before[name], "replayed": replayed_steps[step][name],
                       "difference": _relative(before[name], replayed_steps[step][name])}
                for name in _FIGURES
                if name in before and name in replayed_steps[step]
            },
        }
        for step, before in sorted(recorded.items())
        if step in replayed_steps
    ]  # fmt: skip
    return {
        "run": replay.run.name,
        "replay": str(replayed.path),
        "begins_after": start,
        "trained": max(replayed_steps, default=start),
        "steps": steps,
        "tolerance": tolerance,
        "differing_steps": [
            row["step"]
            for row in steps
            if any(
                (of := row[name]["difference"]) is None or of > tolerance
                for name in _FIGURES
                if name in row
            )
        ],
        "checkpoints": _checkpoints(replay, replayed, tolerance),
    }


def _relative(recorded: float | None, replayed: float | None) -> float | None:
    """Return the relative difference; None stands for a number that is not finite, also for this one."""
    if recorded == replayed:
        return 0.0
    if recorded is None or replayed is None or recorded == 0:
        return None
    return abs(recorded - replayed) / abs(recorded)


def _checkpoints(replay: Replay, replayed: RunDirectory, tolerance: float) -> list[dict[str, Any]]:
    both = set(replay.run.checkpoint_steps()) & set(replayed.checkpoint_steps())
    compared = sorted(step for step in both if step > replay.start_step)
    if not compared:
        return []
    from nanoscale.checkpoint.differences import differing

    rows = []
    for step in compared:
        stored = [find_checkpoint(run.checkpoints, step) for run in (replay.run, replayed)]
        found = list(differing(stored[0], stored[1], tolerance))
        rows.append({"step": step, "differing": [asdict(each) for each in found]})
    return rows


def sentences(about: dict[str, Any], replayed: RunDirectory) -> list[str]:
    """Return what a person wants to know of a comparison."""
    begin, steps = about["begins_after"], about["steps"]
    first, last = begin + 1, about["trained"]
    trained = f"steps {first} to {last}" if last > first else f"step {first}"
    trained = trained if last >= first else "no step"
    origin = f"step-{begin:08d}" if begin else "the initial weights"
    lines = [f"replayed {trained} from {origin}, as {replayed.reference}"]
    more = f" by more than {about['tolerance']:g}" if about["tolerance"] else ""
    if not steps:
        lines.append(f"{about['run']} has logged no loss of these steps")
    elif not about["differing_steps"]:
        lines.append(
            f"{counted(len(steps), 'logged step')} of {about['run']}: no loss or gradient norm differs{more}"
        )
    else:
        first = next(row for row in steps if row["step"] == about["differing_steps"][0])
        lines.append(
            f"step {first['step']} is the first that differs ({len(about['differing_steps'])} of "
            f"{counted(len(steps), 'logged step')} do):"
        )
        lines += [
            f"  {name}  {first[name]['recorded']} was recorded, {first[name]['replayed']} now "
            f"({_shown(first[name]['difference'])})"
            for name in _FIGURES
            if name in first
        ]
    for row in about["checkpoints"]:
        lines += _tensors(row, more)
    return lines


def _shown(relative: float | None) -> str:
    return "not finite" if relative is None else f"relative difference {relative:.1e}"


def _tensors(row: dict[str, Any], more: str) -> list[str]:
    name, found = f"step-{row['step']:08d}", row["differing"]
    if not found:
        return [f"{name}: no tensor differs{more}"]
    sizes = [math.inf if each["relative"] is None else each["relative"] for each in found]
    largest = found[sizes.index(max(sizes))]
    ranks = sorted({rank for each in found for rank in each["ranks"]})
    writers = f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}"
    return [
        f"{name}: {counted(len(found), 'tensor')} differ, all written by {writers}",
        f"  first    {found[0]['name']}  ({_shown(found[0]['relative'])})",
        f"  largest  {largest['name']}  ({_shown(largest['relative'])})",
    ]
