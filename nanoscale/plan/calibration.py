"""Calibration: a machine's efficiency relative to its data sheet, from measured step times.

Every efficiency is the assumed one times a factor. Factors are added one at a time, first the one that the
steps depend on most, usually one for all computing. Another factor is added only if the runs spend such
different shares of their time on it that they identify it, and there are never more factors than runs. They
are fit to the logarithms of the times by Gauss and Newton's method; the further a run is off, the less it
weighs (Huber 1964, Robust Estimation of a Location Parameter), and the worse the runs agree, the more the
assumed values weigh (ridge regression, Hoerl & Kennard 1970).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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


SLOWER = frozenset({"overlap", "eager_s", "compiled_s"})
"""Quantities of which more takes longer: they are divided by their factor."""
KNOBS: Mapping[str, tuple[str, ...]] = {
    "computing": ("matmul", "matmul_fp8", "attention", "memory", "eager_s", "compiled_s"),
    "links": ("intra_host", "inter_host"),
    **{name: (name,) for name in ("matmul", "matmul_fp8", "attention", "memory")},
    **{name: (name,) for name in ("intra_host", "inter_host", "overlap", "eager_s", "compiled_s")},
}
"""The efficiencies that a factor may scale. The scatter between hosts is not among them: it looks like slower
computing."""
APART = 0.05
"""A factor is identified if a change of it changes the step times by at least a twentieth of itself in a way
that the other factors cannot imitate; with less, errors of a few percent in the times would decide it."""
_KNOWN = 0.2
"""Standard deviation of the logarithm of an efficiency around the assumed one, except that of all computing:
the data sheets' figures come from measured single operations."""
_SCATTER = 0.01
"""The least standard deviation of the logarithm of a step's time around the prediction."""
_FARTHEST = math.log(1000)
_LONGEST_STEP = 0.7
_MOST_STEPS = 30
_PROBE = 0.1
"""Efficiencies are probed in both directions: an operation hidden behind another shows in one of them."""
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
    """Factors on speed: above 1, the machine is faster than assumed."""

    factors: dict[str, float]
    """Factors by knob."""
    unused: tuple[str, ...]
    """Efficiencies that affect none of the runs."""

    def on(self, hardware: Hardware) -> Hardware:
        """Return the hardware with the calibrated efficiencies."""
        own = hardware.efficiency
        return replace(hardware, efficiency=replace(own, **self.values(own)))

    def values(self, assumed: Efficiency) -> dict[str, float]:
        """Return the changed efficiencies in the form of `cluster.efficiency`."""
        found: dict[str, float] = {}
        for knob, factor in self.factors.items():
            for name in KNOBS[knob]:
                if name in self.unused:
                    continue
                was = found.get(name, getattr(assumed, name))
                found[name] = was / factor if name in SLOWER else was * factor
        return found


NOTHING = Calibration({}, ())


def calibrate(runs: Sequence[Observation]) -> Calibration:
    """Return the factors that the runs determine. There must be a run.

    A pipeline is simulated once; its ratio to the closed form is assumed to be constant.
    """
    runs = [replace(run, seconds=run.seconds * _closed(run) / predicted(run)) for run in runs]
    unused = tuple(name for name in dict.fromkeys(sum(KNOBS.values(), ())) if _unused(runs, name))
    now = Calibration({}, unused)
    while len(now.factors) < len(runs):
        knob = _next(runs, now)
        if knob is None:
            break
        now = _fit(runs, replace(now, factors={**now.factors, knob: 1.0}))
    return now


def predicted(run: Observation, found: Calibration = NOTHING) -> float:
    """Return the seconds of a run's step; with the assumed efficiencies by default."""
    return predicted_step(run.config, found.on(run.hardware))


def _closed(run: Observation) -> float:
    return step_time(run.config, run.hardware).seconds


def _unused(runs: Sequence[Observation], name: str) -> bool:
    """True if halving this efficiency changes no step time."""
    before, after = _off(runs, NOTHING), _off(runs, Calibration({name: 0.5}, ()))
    return all(a - b < _USED for a, b in zip(after, before, strict=True))


def _next(runs: Sequence[Observation], now: Calibration) -> str | None:
    """Return the knob whose influence on the runs is imitated least by the chosen ones; None if all are
    imitated."""
    others = [name for name in KNOBS if name not in now.factors]
    columns = dict(zip([*now.factors, *others], _influences(runs, now, others), strict=True))
    taken = _orthonormal([columns[name] for name in now.factors])
    rest = {name: _length(_without(columns[name], taken)) for name in others}
    best = max(rest, key=lambda name: rest[name], default=None)
    return best if best is not None and rest[best] >= APART else None


def _influences(
    runs: Sequence[Observation], now: Calibration, others: Sequence[str] = ()
) -> list[list[float]]:
    """Return the derivative of the logarithm of each run's time with respect to that of each factor, by
    knob."""
    columns = []
    for name in [*now.factors, *others]:
        more, less = (
            _off(runs, replace(now, factors=now.factors | {name: now.factors.get(name, 1.0) * by}))
            for by in (math.exp(_PROBE), math.exp(-_PROBE))
        )
        columns.append([(a - b) / (2 * _PROBE) for a, b in zip(more, less, strict=True)])
    return columns


def _off(runs: Sequence[Observation], now: Calibration) -> list[float]:
    """Return the logarithms of predicted over measured times."""
    machines = {id(run.hardware): now.on(run.hardware) for run in runs}
    times = (step_time(run.config, machines[id(run.hardware)]).seconds for run in runs)
    return [math.log(time / run.seconds) for time, run in zip(times, runs, strict=True)]


def _fit(runs: Sequence[Observation], now: Calibration) -> Calibration:
    """Return the likeliest factors given the assumed values, which weigh more the worse the runs agree.

    A fit without this prior shows how well the runs agree. The first factor is free.
    """
    count = len(now.factors)
    free = _off(runs, _descend(runs, now, [0.0] * count))
    near = [min(abs(one), _edge(free)) for one in free]
    scatter = math.sqrt(_dot(near, near) / max(1, len(near) - count))
    hold = (max(_SCATTER, scatter) / _KNOWN) ** 2
    return _descend(runs, now, [0.0, *[hold] * (count - 1)])


def _descend(runs: Sequence[Observation], now: Calibration, holds: Sequence[float]) -> Calibration:
    names = list(now.factors)
    off = _off(runs, now)
    for _ in range(_MOST_STEPS):
        edge = _edge(off)
        weights = [min(1.0, edge / abs(one)) if one else 1.0 for one in off]
        columns = _influences(runs, now)
        place = [math.log(now.factors[name]) for name in names]
        sides = [
            [_dot(a, b, weights) + (holds[i] if i == j else 0.0) for j, b in enumerate(columns)]
            for i, a in enumerate(columns)
        ]
        right = [
            -_dot(a, off, weights) - hold * here
            for a, hold, here in zip(columns, holds, place, strict=True)
        ]
        move = solve(sides, right)
        longest = max(map(abs, move))
        shrink = min(1.0, _LONGEST_STEP / longest) if longest else 1.0
        value = _huber(off, edge) + _dot(place, place, holds) / 2
        for _ in range(6):
            there = [_bounded(a + shrink * b) for a, b in zip(place, move, strict=True)]
            tried = replace(now, factors=dict(zip(names, map(math.exp, there), strict=True)))
            off_then = _off(runs, tried)
            if _huber(off_then, edge) + _dot(there, there, holds) / 2 <= value:
                now, off = tried, off_then
                break
            shrink /= 2
        if shrink * longest < 1e-4:
            break
    return now


def _edge(off: Sequence[float]) -> float:
    """Return the error, 1.48 times the median, beyond which an error counts linearly and not squared."""
    return max(0.05, 1.345 * 1.483 * median(map(abs, off)))


def _bounded(place: float) -> float:
    return min(_FARTHEST, max(-_FARTHEST, place))


def _huber(off: Sequence[float], edge: float) -> float:
    sizes = map(abs, off)
    return sum(a * a / 2 if a <= edge else edge * (a - edge / 2) for a in sizes)


def _dot(a: Sequence[float], b: Sequence[float], weights: Sequence[float] | None = None) -> float:
    return math.fsum(x * y * w for x, y, w in zip(a, b, weights or [1.0] * len(a), strict=True))


def _length(a: Sequence[float]) -> float:
    return math.sqrt(_dot(a, a))


def _without(a: Sequence[float], axes: Sequence[Sequence[float]]) -> list[float]:
    """Return the component of `a` that is orthogonal to all of the axes."""
    rest = list(a)
    for axis in axes:
        along = _dot(rest, axis)
        rest = [x - along * y for x, y in zip(rest, axis, strict=True)]
    return rest


def _orthonormal(columns: Sequence[Sequence[float]]) -> list[list[float]]:
    axes: list[list[float]] = []
    for column in columns:
        rest = _without(column, axes)
        if (length := _length(rest)) > 1e-9:
            axes.append([x / length for x in rest])
    return axes


def solve(sides: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """Return x of A · x = b for a small positive definite A, by elimination."""
    rows = [[*row, b] for row, b in zip(sides, right, strict=True)]
    size = len(rows)
    for i in range(size):
        for j in range(i + 1, size):
            factor = rows[j][i] / rows[i][i]
            rows[j] = [x - factor * y for x, y in zip(rows[j], rows[i], strict=True)]
    found = [0.0] * size
    for i in reversed(range(size)):
        known = sum(rows[i][j] * found[j] for j in range(i + 1, size))
        found[i] = (rows[i][size] - known) / rows[i][i]
    return found
