"""A replay compared with what the run recorded: a document, and sentences."""

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from nanoscale.checkpoint.store import find_checkpoint
from nanoscale.common.json_text import Json
from nanoscale.common.units import counted, listed
from nanoscale.launch.lifecycle.repetition import Replay
from nanoscale.processes.proc import ranges
from nanoscale.runs import metrics
from nanoscale.runs.directory import RunDirectory

_FIGURES = ("loss", "grad_norm", "eval_loss")
_TENSORS = "tensors"


def tolerances(
    layout: Collection[str], is_fp64: bool, chosen: float | None, repeats: bool = True
) -> dict[str, float]:
    """Return the relative differences that count as equal, of each figure and of tensors.

    Args:
        layout: the keys of the layout that differ from the run's; sums are then rounded in another order.
        is_fp64: True if both compute in fp64.
        chosen: the tolerance of all; None: 0 in the same layout, else what layouts may differ by.
        repeats: True if the same layout computes the same bits again.
    """
    names = (*_FIGURES, _TENSORS)
    if chosen is not None or (repeats and not layout):
        return dict.fromkeys(names, chosen or 0.0)
    if is_fp64:
        return dict.fromkeys(names, 1e-9)
    return dict.fromkeys(names, 1e-3) | {"loss": 1e-5, "eval_loss": 1e-5}


def without_records(replay: Replay) -> str:
    """Return that the run has logged no step of a replay, and what can be compared; "" if it has logged one."""
    steps = range(replay.start_step + 1, replay.last + 1)
    if any(record["step"] in steps for record in metrics.read(replay.run)):
        return ""
    saved = [f"{step}" for step in replay.run.checkpoint_steps() if step in steps]
    rest = f"only the checkpoints of steps {listed(saved)} are" if saved else "nothing is"
    return f"{replay.run.name} has logged no loss of {_steps(steps)}: {rest} compared"


def document(
    replay: Replay, replayed: RunDirectory, tolerance: Mapping[str, float], layout: Collection[str]
) -> Json:
    """Return the comparison of recorded and replayed losses, gradient norms and tensors.

    Args:
        tolerance: by name of the figure, the relative difference that still counts as equal.
        layout: the keys of the layout that differ from the run's.
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
    differing_steps = [
        row["step"] for row in steps if any(_differs(row, name, tolerance) for name in _FIGURES)
    ]
    checkpoints = _checkpoints(replay, replayed, tolerance[_TENSORS])
    tensors_differ = [row["step"] for row in checkpoints if row["differing"]]
    return {
        "run": replay.run.name,
        "replay": str(replayed.path),
        "begins_after": start,
        "trained": max(replayed_steps, default=start),
        "steps": steps,
        "not_logged": sorted(replayed_steps.keys() - recorded.keys()),
        "layout": [*layout],
        "tolerance": max(tolerance.values()),
        "tolerances": {**tolerance},
        "first_difference": min([*differing_steps, *tensors_differ], default=None),
        "differing_steps": differing_steps,
        "checkpoints": checkpoints,
    }


def _differs(row: Mapping[str, Any], name: str, tolerance: Mapping[str, float]) -> bool:
    if name not in row:
        return False
    difference = row[name]["difference"]
    return difference is None or difference > tolerance[name]


def _relative(recorded: float | None, replayed: float | None) -> float | None:
    """Return the relative difference; None stands for a number that is not finite, also for this one."""
    if recorded == replayed:
        return 0.0
    if recorded is None or replayed is None or recorded == 0:
        return None
    return abs(recorded - replayed) / abs(recorded)


def _checkpoints(replay: Replay, replayed: RunDirectory, tolerance: float) -> list[Json]:
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


def sentences(about: Json, replayed: RunDirectory) -> list[str]:
    """Return what a person wants to know of a comparison."""
    begin, steps, tolerance = about["begins_after"], about["steps"], about["tolerances"]
    first, last = begin + 1, about["trained"]
    trained = _steps(range(first, last + 1)) if last >= first else "no step"
    origin = f"step-{begin:08d}" if begin else "the initial weights"
    lines = [f"replayed {trained} from {origin}, as {replayed.reference}"]
    more = f" by more than {about['tolerance']:g}" if about["tolerance"] else ""
    cause = "GPUs repeat bits only with precision.deterministic=true"
    if about["layout"]:
        cause = f"another layout ({listed(about['layout'])}) rounds sums in another order"
    is_default = len({*tolerance.values()}) > 1
    if is_default:
        more = " by more than that"
    if is_default or (about["layout"] and about["tolerance"]):
        lines.append(
            f"{cause}; relative differences up to {tolerance['loss']:g} of losses, {tolerance['grad_norm']:g} "
            f"of gradient norms and {tolerance[_TENSORS]:g} of tensors count as equal (--tolerance X: another "
            "limit for all)"
        )
    if not steps:
        lines.append(f"{about['run']} has logged no loss of these steps")
    elif about["not_logged"]:
        missing = ranges(about["not_logged"])
        lines.append(f"{about['run']} did not log these steps, which are not compared: {missing}")
    earliest, differing = about["first_difference"], about["differing_steps"]
    if earliest not in [None, *differing]:
        lines.append(f"step {earliest} is the first that differs, in its checkpoint")
    if steps and not differing:
        lines.append(
            f"{counted(len(steps), 'logged step')} of {about['run']}: no loss or gradient norm differs{more}"
        )
    elif differing:
        row = next(row for row in steps if row["step"] == differing[0])
        which = "first" if earliest in differing else "first logged step"
        lines.append(
            f"step {row['step']} is the {which} that differs ({len(differing)} of "
            f"{counted(len(steps), 'logged step')} do):"
        )
        lines += [
            f"  {name}  {row[name]['recorded']} was recorded, {row[name]['replayed']} now "
            f"({_shown(row[name]['difference'])})"
            for name in _FIGURES
            if _differs(row, name, tolerance)
        ]
    for row in about["checkpoints"]:
        lines += _tensors(row, more)
    return lines


def _steps(steps: range) -> str:
    return f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"


def _shown(relative: float | None) -> str:
    return "not finite" if relative is None else f"relative difference {relative:.1e}"


def _tensors(row: Json, more: str) -> list[str]:
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
