"""Runs that a calibration learns from: their devices and their measured steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from nanoscale.common.errors import UserError, Violation
from nanoscale.config.composing.frozen import load
from nanoscale.config.hardware.data_sheets import CPU, recognise
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.schema import Cluster
from nanoscale.plan.calibration import Observation
from nanoscale.plan.hardware.hardware import hardware_of
from nanoscale.runs.directory import RunDirectory, read_json
from nanoscale.runs.metrics import WARM_UP, Steady, steady

LEAST_STEPS = 5


@dataclass(frozen=True)
class ObservedRun:
    """A run that can be used for calibration."""

    device: str
    steady: Steady
    observation: Observation


def observed_runs(names: Sequence[str], cluster: Cluster | None) -> list[ObservedRun]:
    """Read the runs by their names.

    Args:
        cluster: the machine that they ran on; None: that of each configuration.

    Raises:
        UserError: some cannot be used, each with the reason; or they ran on several devices.
    """
    runs, wrong = list[ObservedRun](), list[Violation]()
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


def _read(run: RunDirectory, cluster: Cluster | None) -> ObservedRun:
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
    return ObservedRun(
        device, told, Observation(run.reference, config, hardware_of(config), told.seconds)
    )


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
