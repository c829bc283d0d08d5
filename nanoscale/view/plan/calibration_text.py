"""The output of `nanoscale plan --calibrate`."""

import time
from collections.abc import Sequence
from pathlib import Path

from nanoscale.common.json_text import Json
from nanoscale.common.units import GIB, byte_size, duration
from nanoscale.config.hardware.data_sheets import CPU
from nanoscale.config.violations import override
from nanoscale.plan.calibration import SLOWER, Calibration, ObservedRun, predicted
from nanoscale.plan.predict import predict
from nanoscale.view.blocks import Column, Lines, Report, table

_OFF = 0.1
"""Differences above it are mentioned."""


def calibration_report(document: Json) -> Report:
    """Return prediction and measurement of each run, and what was learned."""
    has_memory = any(run["memory_gib"] is not None for run in document["runs"])
    columns = [*_RUNS, *([Column("memory", _memory)] if has_memory else [])]
    lines = Lines(_learned(document)), Lines(_advice(document))
    return Report("", [table(columns, document["runs"]), *lines])


def _planned(run: Json, when: str) -> str:
    return f"{duration(run[f'{when}_s'])} {run[f'{when}_error']:+.1%}"


_RUNS = (
    Column("run", "run"),
    Column("steps", "steps"),
    Column("measured", lambda run: duration(run["measured_s"])),
    Column("as assumed", lambda run: _planned(run, "before")),
    Column("as learned", lambda run: _planned(run, "after")),
)


def _memory(run: Json) -> str:
    seen, plan = run["memory_gib"], run["predicted_memory_gib"]
    if not seen:
        return ""
    return f"{byte_size(GIB * seen)}, planned {byte_size(GIB * plan)} ({plan / seen - 1:+.1%})"


def _learned(document: Json) -> list[str]:
    """List the values, and the factor that they share."""
    lines = [
        f"{name:10} {document['assumed'][name]:.3g} → {value:.3g}"
        for name, value in document["efficiency"].items()
    ]
    if not lines:
        return ["the steps of these runs depend on nothing that can be learned"]
    (learned,) = document["learned"]
    return [*lines, f"computing has {learned['factor']:.3f} of the assumed speed"]


def _advice(document: Json) -> list[str]:
    off = max((abs(run["after_error"]) for run in document["runs"]), default=0.0)
    lines = [f"written; type  {document['override']}"]
    if off > _OFF:
        lines.insert(0, f"the runs agree only to {off:.0%}: something else decides their speed")
    too_much = [
        name for name, value in document["efficiency"].items() if value > 1 and name not in SLOWER
    ]
    if too_much:
        lines.insert(
            0, f"{', '.join(too_much)} above 1: the machine is faster than its description"
        )
    return lines


def document(runs: Sequence[ObservedRun], found: Calibration, file: Path) -> Json:
    """Return what the file of a calibration holds."""
    assumed = runs[0].observation.hardware.efficiency
    learned = found.values(assumed)
    return {
        "efficiency": learned,
        "device": runs[0].device,
        "override": override("cluster.efficiency", str(file)),
        "learned": [{"name": "computing", "factor": found.factor, "efficiencies": [*learned]}],
        "assumed": {name: getattr(assumed, name) for name in learned},
        "runs": [_outcome(run, found) for run in runs],
        "time": time.time(),
    }


def _outcome(run: ObservedRun, found: Calibration) -> Json:
    """Compare prediction and measurement, before and after. Memory is shown, but not calibrated."""
    observation = run.observation
    before, after = predicted(observation), predicted(observation, found)
    plan = predict(observation.config, observation.hardware)
    return {
        "run": observation.name,
        "steps": run.steady.steps,
        "measured_s": observation.seconds,
        "before_s": before,
        "before_error": before / observation.seconds - 1,
        "after_s": after,
        "after_error": after / observation.seconds - 1,
        # On a CPU it is the whole process's memory, mostly of libraries.
        "memory_gib": None if run.device == CPU else run.steady.memory_gib,
        "predicted_memory_gib": None if run.device == CPU else plan.worst.allocated / GIB,
    }
