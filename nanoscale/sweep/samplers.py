"""The sources of a sweep's trials: a grid that is known from the start, or an Optuna study."""

from __future__ import annotations

import math
from typing import Any, Protocol

from nanoscale.runs import metrics
from nanoscale.sweep.space import Dimension, Space
from nanoscale.sweep.sweep import Settings, Sweep, Trial

_STARTUP = 5
"""Completed trials before the median pruner judges another one, and random trials before TPE models them."""


class Source(Protocol):
    """A source of trials, which learns how they end."""

    def next(self, trials: list[Trial]) -> Trial | None:
        """Return the next new trial; None after the last."""

    def hopeless(self, trial: Trial) -> bool:
        """True if a running trial should end, by its evaluations so far."""

    def ended(self, trial: Trial, state: str) -> None:
        """Take note of a trial's end."""


class Grid:
    """All combinations, which are known from the start."""

    def next(self, trials: list[Trial]) -> Trial | None:
        return None

    def hopeless(self, trial: Trial) -> bool:
        return False

    def ended(self, trial: Trial, state: str) -> None: ...


class Study:
    """An Optuna study in the sweep's folder, which proposes values and prunes trials."""

    def __init__(self, sweep: Sweep, space: Space, settings: Settings) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._sweep, self._space, self._settings = sweep, space, settings
        self._study = optuna.create_study(
            storage=f"sqlite:///{sweep.storage}",
            study_name=sweep.name,
            load_if_exists=True,
            direction="minimize",
            sampler=_sampler(settings),
            pruner=_pruner(settings),
        )
        self._reported: dict[str, int] = {}

    def next(self, trials: list[Trial]) -> Trial | None:
        """Propose another trial, with values that no earlier one has if possible."""
        if len(trials) >= (self._settings.trials or 0):
            return None
        taken = {one.name for one in trials}
        asked = self._study.ask()
        values = {one.key: _suggested(asked, one) for one in self._space.dimensions}
        name = self._space.name(values)
        number = 2
        while name in taken:
            name = f"{self._space.name(values)}-{number}"
            number += 1
        asked.set_user_attr("run", name)
        return Trial(name, values)

    def hopeless(self, trial: Trial) -> bool:
        """Report the trial's new evaluations to the pruner, and ask it."""
        found = self._find(trial)
        if found is None or self._settings.pruner == "none":
            return False
        for step, value in self._figures(trial):
            if step > self._reported.get(trial.name, 0):
                found.report(value, step)
                self._reported[trial.name] = step
        return bool(found.should_prune())

    def ended(self, trial: Trial, state: str) -> None:
        from optuna.trial import TrialState

        found = self._find(trial)
        if found is None:
            return
        figures = self._figures(trial)
        if state == "completed" and figures:
            self._study.tell(found, figures[-1][1])
        else:
            pruned = state == "pruned"
            self._study.tell(found, state=TrialState.PRUNED if pruned else TrialState.FAIL)

    def best(self) -> str | None:
        """Return the name of the best trial so far."""
        done: list[tuple[float, str]] = [
            (one.value, one.user_attrs["run"])
            for one in self._study.get_trials(deepcopy=False)
            if one.value is not None
        ]
        return min(done)[1] if done else None

    def _find(self, trial: Trial) -> Any:
        """Return Optuna's trial that has not ended."""
        import optuna

        for frozen in self._study.get_trials(deepcopy=False):
            if frozen.user_attrs.get("run") == trial.name and not frozen.state.is_finished():
                return optuna.trial.Trial(self._study, frozen._trial_id)
        return None

    def _figures(self, trial: Trial) -> list[tuple[int, float]]:
        """Return the steps and finite values of the metric."""
        run = self._sweep.run(trial)
        if not run.metrics.exists():
            return []
        pairs = ((one["step"], one.get(self._settings.metric)) for one in metrics.read(run))
        return [
            (step, value) for step, value in pairs if value is not None and math.isfinite(value)
        ]


def _sampler(settings: Settings) -> Any:
    import optuna

    if settings.sampler == "random":
        return optuna.samplers.RandomSampler(seed=settings.seed)
    return optuna.samplers.TPESampler(seed=settings.seed, n_startup_trials=_STARTUP)


def _pruner(settings: Settings) -> Any:
    import optuna

    if settings.pruner == "median":
        return optuna.pruners.MedianPruner(n_startup_trials=_STARTUP)
    if settings.pruner == "asha":
        return optuna.pruners.SuccessiveHalvingPruner()
    return optuna.pruners.NopPruner()


def _suggested(trial: Any, dimension: Dimension) -> str:
    interval = dimension.interval
    if interval is None:
        return str(trial.suggest_categorical(dimension.key, list(dimension.values)))
    if interval.integer:
        low, high = int(interval.low), int(interval.high)
        return str(trial.suggest_int(dimension.key, low, high, log=interval.logarithmic))
    number = trial.suggest_float(
        dimension.key, interval.low, interval.high, log=interval.logarithmic
    )
    return f"{number:.6g}"
