"""The sources of a sweep's trials: a grid that is known from the start, or an Optuna study."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from nanoscale.common import display
from nanoscale.common.errors import UserError, Violation
from nanoscale.common.versions import missing
from nanoscale.config.values.provenance import COMMAND_LINE
from nanoscale.config.violations import nearest, refuse
from nanoscale.launch.request import Request
from nanoscale.runs import metrics
from nanoscale.sweep.space import Dimension, Space
from nanoscale.sweep.sweep import Settings, State, Sweep, Trial, free_name

_STARTUP = 5
"""Completed trials before the median pruner judges another one, and random trials before TPE models them."""


def check_sampler(settings: Settings, space: Space) -> None:
    """Check the options of a sampler.

    Raises:
        UserError: they do not fit together, or Optuna is not installed.
    """
    if settings.slurm and settings.sampler != "grid":
        raise UserError("usage", f"--slurm runs a grid; remove --sampler {settings.sampler}")
    if settings.sampler == "grid":
        given = {
            "--trials": settings.trials is not None,
            "--pruner": settings.pruner != "none",
            "--seed": settings.seed != 0,
        }
        for option, is_given in given.items():
            if is_given:
                raise UserError("usage", f"{option} needs --sampler random or --sampler tpe")
        space.grid()
        return
    if settings.trials is None:
        raise UserError("usage", f"--sampler {settings.sampler} needs --trials N")
    if what := missing("optuna"):
        raise UserError("usage", f"--sampler {settings.sampler} needs {what}")


def with_metric(settings: Settings, requests: Sequence[Request]) -> Settings:
    """Return the settings with a metric: eval_loss, or loss if a trial is not evaluated.

    Raises:
        UserError: the requested metric is not logged, so that a sampler would learn nothing.
    """
    trains = [request.config.train for request in requests]
    is_evaluated = all(train.eval_every for train in trains)
    if not settings.metric:
        if settings.sampler != "grid" and not is_evaluated:
            display.note("train.eval_every=0: the sampler minimizes the training loss")
        return replace(settings, metric="eval_loss" if is_evaluated else "loss")
    group, _, data_set = settings.metric.partition("/")
    sources = ("--metric", settings.metric, COMMAND_LINE)
    if settings.metric not in metrics.known_metrics() and not (group == "eval_loss" and data_set):
        advice = tuple(
            f"--metric {name}" for name in nearest(settings.metric, metrics.known_metrics())
        )
        refuse([Violation(*sources, "unknown metric of metrics.jsonl", advice)], kind="usage")
    if settings.sampler != "grid" and group.startswith("eval_") and not is_evaluated:
        every = max(1, min(train.steps for train in trains) // 10)
        message = "is never measured with train.eval_every=0"
        advice = (f"train.eval_every={every}", "--metric loss")
        refuse([Violation(*sources, message, advice)], kind="usage")
    return settings


def first_trials(settings: Settings, space: Space) -> list[Trial]:
    """Return the trials of a new grid; a sampler proposes its own one by one."""
    trials: list[Trial] = []
    for values in space.grid() if settings.sampler == "grid" else ():
        name = free_name(space.name(values), {one.name for one in trials})
        trials.append(Trial(name, values))
    return trials


class Study:
    """An Optuna study in the sweep's folder, which proposes values and prunes trials."""

    def __init__(self, sweep: Sweep, space: Space, settings: Settings) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._sweep, self._space, self._settings = sweep, space, settings
        pruners = {
            "none": optuna.pruners.NopPruner(),
            "median": optuna.pruners.MedianPruner(n_startup_trials=_STARTUP),
            "asha": optuna.pruners.SuccessiveHalvingPruner(),
        }
        try:
            self._study = optuna.create_study(
                storage=f"sqlite:///{sweep.storage}",
                study_name=sweep.name,
                load_if_exists=True,
                direction="maximize" if metrics.rises(settings.metric) else "minimize",
                pruner=pruners[settings.pruner],
            )
        except Exception as error:  # SQLAlchemy's errors, which optuna does not wrap
            reason = str(error).partition("\n")[0]
            raise UserError("usage", f"{sweep.storage} cannot be read: {reason}") from error

    def next(self, trials: list[Trial]) -> Trial | None:
        """Propose another trial; None after the last. A name of an earlier trial gets a number."""
        import optuna

        if len(trials) >= (self._settings.trials or 0):
            return None
        # Each proposal has a seed of its own, so that a resumed sweep continues the random sequence.
        seed = self._settings.seed + len(trials)
        self._study.sampler = (
            optuna.samplers.RandomSampler(seed=seed)
            if self._settings.sampler == "random"
            else optuna.samplers.TPESampler(seed=seed, n_startup_trials=_STARTUP)
        )
        proposal = self._study.ask()
        values = {one.key: _suggested(proposal, one) for one in self._space.dimensions}
        name = free_name(self._space.name(values), {one.name for one in trials})
        proposal.set_user_attr("run", name)
        return Trial(name, values)

    def should_prune(self, trial: Trial) -> bool:
        """Report a running trial's new evaluations to the pruner, and ask it. A retried trial is not pruned."""
        import optuna

        frozen = self._newest(trial)
        if frozen is None or frozen.state.is_finished() or self._settings.pruner == "none":
            return False
        asked = optuna.trial.Trial(self._study, frozen._trial_id)
        for step, value in self._figures(trial):
            if step not in frozen.intermediate_values:
                asked.report(value, step)
        return bool(asked.should_prune())

    def ended(self, trial: Trial, state: State) -> None:
        """Record a trial's end. Optuna changes no finished trial, so a retried one is added as another."""
        import optuna
        from optuna.trial import TrialState

        frozen, figures = self._newest(trial), self._figures(trial)
        if frozen is None:
            return
        loss = figures[-1][1] if state == "completed" and figures else None
        result = TrialState.PRUNED if state == "pruned" else TrialState.FAIL
        result = TrialState.COMPLETE if loss is not None else result
        if not frozen.state.is_finished():
            self._study.tell(frozen.number, loss, result)
        elif frozen.state == TrialState.FAIL and result != TrialState.FAIL:
            retried = optuna.trial.create_trial(
                state=result,
                value=loss,
                params=frozen.params,
                distributions=frozen.distributions,
                user_attrs=frozen.user_attrs,
                intermediate_values=dict(figures),
            )
            self._study.add_trial(retried)

    def _newest(self, trial: Trial) -> Any:
        """Return Optuna's newest trial for a trial of the sweep; None if there is none."""
        known = reversed(self._study.get_trials(deepcopy=False))
        return next((one for one in known if one.user_attrs.get("run") == trial.name), None)

    def _figures(self, trial: Trial) -> list[tuple[int, float]]:
        records = metrics.read(self._sweep.run(trial))
        pairs = ((one["step"], one.get(self._settings.metric)) for one in records)
        return [
            (step, value) for step, value in pairs if value is not None and math.isfinite(value)
        ]


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
