"""`nanoscale plan --calibrate RUN…`: learn from runs what their machine reaches."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nanoscale.cli.common.files import require_writable, write_file
from nanoscale.cli.common.output import DONE, console, print_json
from nanoscale.common.errors import UserError, Violation
from nanoscale.common.units import GIB
from nanoscale.config.composing.compose import compose
from nanoscale.config.composing.frozen import load
from nanoscale.config.hardware.data_sheets import CPU, recognise
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.schema import Cluster
from nanoscale.config.violations import override
from nanoscale.plan.calibration import KNOBS, Calibration, Observation, calibrate, predicted
from nanoscale.plan.hardware.hardware import hardware_of
from nanoscale.plan.predict import predict
from nanoscale.runs.directory import RunDirectory, read_json
from nanoscale.runs.steady import WARM_UP, Steady, steady
from nanoscale.view.plan.calibration_text import print_calibration

LEAST_STEPS = 5


@dataclass(frozen=True)
class _Run:
    """A run that can be used for calibration."""

    device: str
    steady: Steady
    observation: Observation


def calibrate_from(
    words: Sequence[str],
    file: Path | None,
    config_dir: Path | None,
    overwrite: bool,
    as_json: bool,
) -> int:
    """Fit the runs among the words on the hardware that the other words describe, and write the file.

    Raises:
        UserError: a run cannot be used, the words set more than the hardware, or the file exists and has other
            content.
    """
    names, overrides = _sorted(words)
    cluster = _described(overrides, config_dir)
    runs = _readable(names, cluster)
    file = (file or Path(f"efficiency-{runs[0].device}.json")).absolute()
    require_writable("--write", file, overwrite=overwrite, is_own=_is_calibration)
    found = calibrate([run.observation for run in runs])
    document = _document(runs, found, file)
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    write_file("--write", file, text, overwrite=overwrite or _is_calibration(file))
    if as_json:
        print_json(document)
    else:
        print_calibration(console(), document)
    return DONE


def _is_calibration(file: Path) -> bool:
    """True for a file that `--calibrate` wrote."""
    try:
        document = read_json(file)
    except (OSError, ValueError):
        return False
    return isinstance(document, dict) and {"efficiency", "learned", "runs"} <= document.keys()


def _sorted(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate runs and overrides. A run's path may contain any character, an override's key no slash."""
    names = [word for word in words if "/" in word.partition("=")[0] or "=" not in word]
    overrides = [word for word in words if word not in names]
    if not names:
        raise UserError("usage", "--calibrate needs runs: type nanoscale plan --calibrate RUN …")
    other = [word for word in overrides if not word.startswith(("cluster=", "cluster."))]
    if other:
        raise UserError(
            "usage",
            f"{', '.join(other)} cannot be given with --calibrate: the runs hold their "
            f"configuration; only the machine may be described, as in cluster=h100-sxm",
        )
    return names, overrides


def _described(overrides: list[str], config_dir: Path | None) -> Cluster | None:
    """Return the machine of the command line; None if each run uses its own."""
    return compose(overrides, config_dir=config_dir).config.cluster if overrides else None


def _readable(names: Sequence[str], cluster: Cluster | None) -> list[_Run]:
    """Read all of the runs.

    Raises:
        UserError: some cannot be used, each with the reason; or they ran on several devices.
    """
    runs, wrong = list[_Run](), list[Violation]()
    for directory in dict.fromkeys(RunDirectory.open(name) for name in names):
        try:
            runs.append(_read(directory, cluster))
        except UserError as error:
            wrong.append(Violation(directory.reference, None, "", error.message))
    wanted = cluster.device if cluster is not None else None
    wanted = wanted or (runs[0].device if runs else None)
    wrong += [
        Violation(
            run.observation.name,
            None,
            "",
            f"ran on {run.device}, not on {wanted}: a file of efficiencies describes one device",
        )
        for run in runs
        if run.device != wanted
    ]
    if wrong:
        raise UserError("run", "nothing can be learned from some of the runs", wrong)
    return runs


def _read(run: RunDirectory, cluster: Cluster | None) -> _Run:
    """Read a run; raise a UserError if it cannot be used."""
    config = load(run.config)
    told = steady(run)
    if not run.metrics.exists():
        raise UserError("run", "has no metrics.jsonl: it has not trained a step")
    if told.seconds is None or told.steps < LEAST_STEPS:
        raise UserError(
            "run",
            f"has {told.steps} steps after the first {WARM_UP} of each start, and at least {LEAST_STEPS} "
            "are needed; steps are logged each train.log_every",
        )
    device = _device(run, config, cluster)
    # A new calibration does not start from the results of an earlier one.
    planned_on = cluster or replace(
        config.cluster, efficiency=None, device=None if device == CPU else device
    )
    config = replace(config, cluster=planned_on)
    return _Run(device, told, Observation(run.reference, config, hardware_of(config), told.seconds))


def _device(run: RunDirectory, config: ResolvedConfig, cluster: Cluster | None) -> str:
    """Return the table's name of a run's device; for unlisted devices, that of the command line."""
    if config.launcher.device == "cpu":
        return CPU
    if config.cluster.device is not None:
        return config.cluster.device
    try:
        names = sorted(set(read_json(run.environment)["gpus"]))
    except (OSError, ValueError, KeyError, TypeError):
        names = []
    known = {recognise(name) for name in names}
    if len(known) == 1 and (device := known.pop()) is not None:
        return device
    if cluster is not None and cluster.device not in (None, CPU):
        return str(cluster.device)
    what = " and ".join(names) or "unknown GPUs"
    raise UserError("run", f"ran on {what}, which is not one known device: type cluster=NAME")


def _document(runs: Sequence[_Run], found: Calibration, file: Path) -> dict[str, Any]:
    assumed = runs[0].observation.hardware.efficiency
    learned = found.values(assumed)
    return {
        "efficiency": learned,
        "device": runs[0].device,
        "override": override("cluster.efficiency", str(file)),
        "learned": [
            {
                "name": name,
                "factor": factor,
                "efficiencies": [key for key in KNOBS[name] if key in learned],
            }
            for name, factor in found.factors.items()
        ],
        "assumed": {name: getattr(assumed, name) for name in learned},
        "runs": [_outcome(run, found) for run in runs],
        "time": time.time(),
    }


def _outcome(run: _Run, found: Calibration) -> dict[str, Any]:
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
        # On a CPU it is that of the whole process, mostly of libraries.
        "memory_gib": None if run.device == CPU else run.steady.memory_gib,
        "predicted_memory_gib": None if run.device == CPU else plan.worst.allocated / GIB,
    }
