"""Calibration: a machine's speed relative to the one assumed, from measured step times.

One factor scales all efficiencies of computing. For each run, it is the factor with which the plan equals the
measured step time. The result is the median of the runs, so that a single wrong run does not decide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from nanoscale.common.errors import UserError, Violation
from nanoscale.config.composing.frozen import load
from nanoscale.config.hardware.data_sheets import CPU, recognise
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.schema import Cluster
from nanoscale.plan.hardware.hardware import Efficiency, Hardware, hardware_of
from nanoscale.plan.predict import predicted_step
from nanoscale.plan.time.step import step_time
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
        cluster: the machine that they ran on; None: the machine of each configuration.

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
    why = f"not on {wanted}: a file of efficiencies describes one device"
    wrong += [
        Violation(run.observation.name, None, "", f"ran on {run.device}, {why}")
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
        needed = f"at least {LEAST_STEPS} are needed; steps are logged each train.log_every"
        count = f"{told.steps} steps after the first {WARM_UP} of each start"
        raise UserError("run", f"has {count}, and {needed}")
    device = _device(run, config, cluster)
    # A new calibration does not start from the results of an earlier one.
    named = None if device == CPU else device
    planned_on = cluster or replace(config.cluster, efficiency=None, device=named)
    config = replace(config, cluster=planned_on)
    observation = Observation(run.reference, config, hardware_of(config), told.seconds)
    return ObservedRun(device, told, observation)


def _device(run: RunDirectory, config: ResolvedConfig, cluster: Cluster | None) -> str:
    """Return the table's name of a run's device; for unlisted devices, the name on the command line."""
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


COMPUTING = ("matmul", "matmul_fp8", "attention", "memory", "eager_s", "compiled_s")
"""The efficiencies that the factor scales."""
SLOWER = frozenset({"eager_s", "compiled_s"})
"""Efficiencies in seconds, which are divided by the factor."""
_FARTHEST = math.log(1000)
_HALVINGS = 40
"""Halvings of the interval in which a factor lies."""
_USED = 0.002


@dataclass(frozen=True)
class Observation:
    """The steady step of a run, and the configuration and hardware of its plan."""

    name: str
    config: ResolvedConfig
    hardware: Hardware
    """The hardware with the assumed efficiencies."""
    seconds: float
    """The measured time of a step."""


@dataclass(frozen=True)
class Calibration:
    """A factor on the speed of computing: above 1, the machine is faster than assumed."""

    factor: float
    used: tuple[str, ...]
    """The efficiencies that affect one of the runs."""

    def on(self, hardware: Hardware) -> Hardware:
        """Return the hardware with the calibrated efficiencies."""
        own = hardware.efficiency
        return replace(hardware, efficiency=replace(own, **self.values(own)))

    def values(self, assumed: Efficiency) -> dict[str, float]:
        """Return the changed efficiencies in the form of `cluster.efficiency`."""
        return {
            name: getattr(assumed, name) * self.factor ** (-1 if name in SLOWER else 1)
            for name in self.used
        }


NOTHING = Calibration(1.0, ())


def calibrate(runs: Sequence[Observation]) -> Calibration:
    """Return the factor that fits the median of the runs. There must be a run."""
    used = tuple(name for name in COMPUTING if any(_depends(run, name) for run in runs))
    return Calibration(median(_factor(run, used) for run in runs), used) if used else NOTHING


def predicted(run: Observation, calibration: Calibration = NOTHING) -> float:
    """Return the seconds of a run's step; with the assumed efficiencies by default."""
    return predicted_step(run.config, calibration.on(run.hardware))


def _factor(run: Observation, used: tuple[str, ...]) -> float:
    """Return the factor with which a run's plan has the measured time, or comes closest to it.

    A pipeline is simulated once; its ratio to the closed form is assumed to be constant.
    """
    seconds = run.seconds * _closed(run, NOTHING) / predicted(run)
    low, high = -_FARTHEST, _FARTHEST
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _closed(run, Calibration(math.exp(middle), used)) > seconds:
            low = middle
        else:
            high = middle
    return math.exp((low + high) / 2)


def _closed(run: Observation, calibration: Calibration) -> float:
    return step_time(run.config, calibration.on(run.hardware)).seconds


def _depends(run: Observation, name: str) -> bool:
    """True if halving this efficiency changes the step time."""
    return _closed(run, Calibration(0.5, (name,))) > (1 + _USED) * _closed(run, NOTHING)
