"""`nanoscale sweep`: many trainings of one command line, each with other values."""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from nanoscale.cli.common import options as opt
from nanoscale.cli.common.output import DONE, FAILED, answer, exit_code_of_signal
from nanoscale.cli.common.request import (
    HOSTS,
    CommandLine,
    Refusals,
    planned,
    request_job,
    requesting,
)
from nanoscale.cli.common.trust import ask
from nanoscale.cli.jobs.submit import request_for_batch, through_batch
from nanoscale.common import display
from nanoscale.common.errors import UserError, Violation
from nanoscale.common.json_text import Json
from nanoscale.config.reference import declared, meaning
from nanoscale.config.violations import quoted, refuse
from nanoscale.launch.fleet.signals import Signals

if TYPE_CHECKING:
    from nanoscale.launch.request import Request
    from nanoscale.sweep.runner import Slot
    from nanoscale.sweep.space import Space
    from nanoscale.sweep.sweep import Settings, State, Sweep, Trial
    from nanoscale.view.run.sweep_table import SweepTable


@requesting("config_dir", *HOSTS, "no_preflight", "trust")
def sweep(
    line: CommandLine,
    name: str | None = opt.option("Name the sweep and its folder", shown="the recipe and the time"),
    root: Path = opt.option("Keep sweeps in this folder", default=Path("sweeps")),
    resume: str | None = opt.option("Run what is missing of a sweep", metavar="NAME"),
    retry: bool = opt.flag("Resume trials that have failed, too", "--retry"),
    sampler: Literal["grid", "random", "tpe"] | None = opt.option(
        "Choose values by this method", shown="grid"
    ),
    trials: int | None = opt.option("Limit the trials of a sampler", min=1),
    pruner: Literal["none", "median", "asha"] | None = opt.option(
        "Stop bad trials of a sampler early", shown="none"
    ),
    metric: str | None = opt.option(
        "Optimize this figure of metrics.jsonl", shown="eval_loss, or loss"
    ),
    seed: int | None = opt.option("Set the seed of the sampler", shown="0", min=0),
    at_once: int | None = opt.option(
        "Run this many trials at once", metavar="N", shown="as devices allow", min=1
    ),
    slurm: bool = opt.flag("Run the trials as an array of SLURM jobs", "--slurm"),
    dry_run: opt.DryRun = False,
    force: opt.Force = False,
    as_json: opt.AsJson = False,
) -> int:
    """Train once for each combination of values, as in `optimizer.lr=1e-3,3e-4 train.seed=1,2`."""
    from nanoscale.sweep.samplers import check_sampler, first_trials
    from nanoscale.sweep.space import read_space
    from nanoscale.sweep.sweep import Settings, Sweep

    overrides = [*(line.overrides or ())]
    overrides += [f"{key}={quoted(setting.value)}" for key, setting in line.options.items()]
    known: list[Trial] | None = None
    if resume is not None:
        given = {
            "overrides": overrides, "--name": name, "--sampler": sampler, "--trials": trials,
            "--pruner": pruner, "--metric": metric, "--seed": seed,
            "--config-dir": line.config_dir, "--slurm": slurm or None,
        }  # fmt: skip
        if kept := [option for option, value in given.items() if value not in (None, [])]:
            message = (
                f"--resume takes no {', '.join(kept)}: a sweep keeps those that it was started with"
            )
            raise UserError("usage", message)
        folder = Sweep(_folder(root, resume, "--resume"))
        settings, known = folder.read()
    else:
        config_dir = str(line.config_dir.absolute()) if line.config_dir else None
        figures = sampler or "grid", trials, pruner or "none", metric or "", seed or 0
        settings = Settings(overrides, *figures, config_dir, slurm)
        check_sampler(settings, read_space(overrides, line.config_dir))
        folder = Sweep(_folder(root, name or _default_name(overrides), "--name"))
        if folder.file.exists():
            earlier, known = folder.read()
            if earlier != replace(settings, metric=settings.metric or earlier.metric):
                message = f"the sweep {folder.name} exists already, with other values or options"
                advice = (folder.resume_command,)
                violation = Violation("--name", folder.name, "command line", message, advice)
                raise UserError("usage", message, [violation])
    space = read_space(settings.overrides, _config_dir(settings))
    present = first_trials(settings, space) if known is None else known
    if known is not None and not line.trust:
        _require_trust(folder, settings, space, known)
    options = at_once, dry_run, force, as_json, retry, line.trust
    return _run(_Start(folder, settings, space, present, known is None, *options))


def _require_trust(sweep: Sweep, settings: Settings, space: Space, trials: Sequence[Trial]) -> None:
    """Ask before code and programs run that the file of another user's sweep names, or a changed one."""
    from nanoscale.runs.trust import executed

    known = declared()
    kept = {(key, text) for trial in trials for key, text in trial.values.items()}
    swept = {(key, text) for key, text in kept if key in known and known[key].executes}
    if sweep.is_own(settings) and swept <= {
        (it.key, text) for it in space.dimensions for text in it.values
    }:
        return
    line = CommandLine(space.overrides(space.probes()[0]), config_dir=_config_dir(settings))
    named = [*executed(line.compose_settings().config).items(), *sorted(swept)]
    ask(sweep.file, [Violation(key, value, str(sweep.file), meaning(key)) for key, value in named])


@dataclass(frozen=True)
class _Start:
    """One start of a sweep: what it is, and the options that may differ each time."""

    sweep: Sweep
    settings: Settings
    space: Space
    trials: list[Trial]
    is_new: bool
    at_once: int | None
    dry_run: bool
    force: bool
    as_json: bool
    retry: bool
    trust: bool

    def table(self) -> SweepTable:
        """Return the view of all trials."""
        from nanoscale.view.run.sweep_table import SweepTable

        return SweepTable(sys.stderr if self.as_json else sys.stdout)

    def rows(self, trials: Sequence[Trial], failed: Collection[str] = ()) -> list[Json]:
        """Return the rows of the table; a trial whose launcher refused to start has no state of its own."""
        row, metric = self.sweep.row, self.settings.metric
        return [row(one, metric, "failed" if one.name in failed else None) for one in trials]


def _run(start: _Start) -> int:
    """Check and plan the trials, and run the missing ones."""
    from nanoscale.sweep.runner import slots_of
    from nanoscale.sweep.samplers import with_metric
    from nanoscale.view.run.sweep_table import show_plan

    space, trials, slurm = start.space, start.trials, start.settings.slurm
    ended = ("completed", "pruned") if start.retry else ("completed", "pruned", "failed")
    unfinished = [one for one in trials if start.sweep.state(one) not in ended]
    new = _new_requests(start, unfinished)
    start = replace(start, settings=with_metric(start.settings, new))
    requests = [*new, *([] if slurm else _begun_requests(start.sweep, unfinished))]
    slots: list[Slot] = []
    if not slurm and requests:
        values = unfinished[0].values if unfinished else space.probes()[0]
        line = CommandLine(space.overrides(values), config_dir=_config_dir(start.settings))
        keys = [one.key for one in space.dimensions]
        slots = slots_of(requests, line.compose(), start.at_once, keys)
    count = len(trials) if start.settings.sampler == "grid" else start.settings.trials or 0
    left = len(unfinished) + count - len(trials)
    at_once = start.at_once if slurm else max(1, len(slots))
    if not start.force:
        _require_disk(start, requests, left, at_once)
    costs = [_cost(one, one.plan) for one in requests if one.plan is not None]
    show_plan(start.sweep, count, costs, left, at_once)
    if start.dry_run:
        rows = [{"trial": one.name, **one.values} for one in trials]
        document = {"sweep": str(start.sweep.path), "trials": rows, "at_once": at_once}
        answer(start.as_json, document, _show_trials, start)
        return DONE
    return _run_array(start, new) if slurm else _run_here(start, slots)


def _show_trials(start: _Start) -> None:
    """Show the result of a dry run."""
    for trial in start.trials:
        display.show(trial.name)
    display.note(f"this would be {start.sweep.path}; nothing was written or started")


def _run_here(start: _Start, slots: Sequence[Slot]) -> int:
    """Run the missing trials from this process, and show all of them until they have ended."""
    from nanoscale.sweep.runner import Runner
    from nanoscale.sweep.samplers import Study

    sweep, settings, space = start.sweep, start.settings, start.space
    if start.is_new:
        sweep.create(settings, start.trials)
    shown_at = 0.0

    def show(current: Sequence[Trial], *, changed: bool, stopping: bool) -> None:
        nonlocal shown_at
        if changed or time.monotonic() - shown_at > 1.0:
            shown_at = time.monotonic()
            rows = start.rows(current, runner.failed)
            view.show(rows, stopping=stopping)
            if changed:
                sweep.keep_table(rows)

    with sweep.held(), Signals() as signals, start.table() as view:
        source = None if settings.sampler == "grid" else Study(sweep, space, settings)
        words = [*(["--force"] if start.force else ()), *(["--trust"] if start.trust else ())]
        options = words, start.retry
        runner = Runner(sweep, settings, space, source, start.trials, slots, show, *options)
        whole = runner.run(signals)
    rows = start.rows(runner.trials, runner.failed)
    failed = [trial for trial in runner.trials if trial.name in runner.failed]
    return _report(start, rows, failed, None if whole else signals)


def _run_array(start: _Start, requests: Sequence[Request]) -> int:
    """Submit the missing trials to SLURM, and show all of them until they have ended."""
    from nanoscale.sweep import slurm_array

    sweep, trials = start.sweep, start.trials
    if shutil.which("sbatch") is None:
        raise UserError("slurm", "sbatch is not installed here; run the sweep on a login node")
    if start.is_new:
        sweep.create(start.settings, trials)
    with sweep.held():
        with _removed_on_refusal(sweep if start.is_new else None):
            states = slurm_array.states(sweep, trials)
            missing = slurm_array.missing(trials, states, retry=start.retry)
            jobs = slurm_array.submit(sweep, missing, requests, start.at_once)
        for job in jobs:
            display.note(f"queued as job {job.job}; to end it: scancel {shlex.quote(job.job)}")
        rows: list[Json] = []
        with Signals() as signals, start.table() as view:

            def show(states: Sequence[State]) -> None:
                nonlocal rows
                pairs = zip(trials, states, strict=True)
                rows = [sweep.row(one, start.settings.metric, state) for one, state in pairs]
                view.show(rows)
                sweep.keep_table(rows)

            whole = slurm_array.follow(sweep, trials, signals, show)
    rows = rows or start.rows(trials)
    failed = [one for one, row in zip(trials, rows, strict=True) if row["state"] == "failed"]
    more = {"jobs": [job.job for job in jobs]}
    return _report(start, rows, failed, None if whole else signals, more)


def _report(
    start: _Start, rows: Sequence[Json], failed: Sequence[Trial],
    stopped_by: Signals | None, more: Json | None = None,
) -> int:  # fmt: skip
    """Keep and show the result; return the exit code of the command.

    Args:
        failed: the trials that have failed since the command was started.
        stopped_by: the signals, if one came before the last trial has ended.
        more: further entries of the JSON document.
    """
    from nanoscale.view.run.sweep_table import print_table, show_end

    start.sweep.keep_table(rows)
    document = {"sweep": str(start.sweep.path), "trials": rows, **(more or {})}
    answer(start.as_json, document, print_table, rows, sys.stdout)
    show_end(start.sweep, start.settings, rows, failed, stopped_by is not None)
    if stopped_by is not None and stopped_by.first is not None:
        return exit_code_of_signal(stopped_by.first)
    return DONE if all(row["state"] in ("completed", "pruned") for row in rows) else FAILED


@contextmanager
def _removed_on_refusal(new: Sweep | None) -> Iterator[None]:
    """Remove a new sweep's folder if SLURM does not take its trials."""
    from nanoscale.launch.batch.system import BatchError

    try:
        yield
    except (BatchError, UserError) as error:
        if new is not None:
            shutil.rmtree(new.path)
        if isinstance(error, UserError):
            raise
        raise UserError("slurm", f"SLURM cannot be asked here: {error}") from error


# --- the sweep ------------------------------------------------------------------------------------


def _folder(root: Path, name: str, option: str) -> Path:
    path = Path(name)
    if name != path.name or name.startswith((".", "-")):
        message = "must be the name of a folder, without a slash"
        advice: tuple[str, ...] = ()
        if (path / "sweep.json").exists() and path.name:
            advice = (shlex.join(["--resume", path.name, "--root", str(path.parent)]),)
        refuse([Violation(option, name, "command line", message, advice)], kind="usage")
    return root.expanduser().absolute() / name


def _default_name(overrides: Sequence[str]) -> str:
    recipes = [text.partition("=")[2] for text in overrides if text.startswith("recipe=")]
    first = Path(recipes[-1]).stem if recipes and "," not in recipes[-1] else "sweep"
    return f"{first}-{time.strftime('%Y%m%d-%H%M%S')}"


def _config_dir(settings: Settings) -> Path | None:
    return Path(settings.config_dir) if settings.config_dir else None


# --- the requests of the trials -------------------------------------------------------------------


def _begun_requests(sweep: Sweep, unfinished: Sequence[Trial]) -> list[Request]:
    """Return the requests of the trials that are resumed, which continue whatever the plan says.

    Raises:
        UserError: this machine or the hosts cannot run one of them any more.
    """
    configs = [sweep.run(one).config for one in unfinished]
    lines = [CommandLine(config_file=path) for path in configs if path.exists()]
    requests = [request_job(line, starts=False) for line in lines]
    return [planned(request, Refusals(), force=True) for request in requests]


def _new_requests(start: _Start, unfinished: Sequence[Trial]) -> list[Request]:
    """Check and plan every trial that has no run yet; examples, if a sampler chooses them."""
    from nanoscale.config.composing.compose import Setting

    sweep, space, settings = start.sweep, start.space, start.settings
    if settings.sampler == "grid":
        new = [one for one in unfinished if not sweep.run(one).config.exists()]
        named = [(one.name, one.values) for one in new]
    else:
        named = [(space.name(values), values) for values in space.probes()]
    requests: list[Request] = []
    wrong: dict[str, Violation] = {}
    errors: dict[str, UserError] = {}
    for name, values in named:
        own = {"run.name": Setting(name, "sweep"), "run.root": Setting(str(sweep.runs), "sweep")}
        overrides = space.overrides(values)
        line = CommandLine(overrides, config_dir=_config_dir(settings), options=own)
        try:
            if settings.slurm:
                line = replace(through_batch(line), trust=True)
                request = request_for_batch(line, fetch=not start.dry_run)
            else:
                request = request_job(line)
            requests.append(planned(request, Refusals(), force=start.force))
        except UserError as error:
            if not error.violations:
                raise
            errors[name] = error
            for violation in error.violations:
                wrong.setdefault(str(violation), violation)
    if errors:
        shown = ", ".join([*errors][:3]) + (", …" if len(errors) > 3 else "")
        message = f"{len(errors)} of {len(named)} trials cannot run ({shown})"
        kinds = [error.kind for error in errors.values()]
        kind = next((kind for kind in kinds if kind != "plan"), "plan")
        raise UserError(kind, message, list(wrong.values()))
    return requests


def _require_disk(
    start: _Start, requests: Sequence[Request], left: int, at_once: int | None
) -> None:
    """Require that the disk has room for the checkpoints of all trials that are left."""
    from nanoscale.config.resolved import ResolvedCheckpoint
    from nanoscale.sweep.disk import fits, refuse

    space, savings = start.space, [one.saving for one in requests]
    trials = len(requests) if start.settings.sampler == "grid" else left
    if fits(savings, trials, at_once):
        return
    alternatives = None
    if start.is_new:
        varied = any(one.key.partition(".")[0] == "checkpoint" for one in space.dimensions)
        alternatives = {}
        for override in () if varied else ("checkpoint.keep_last=1", "checkpoint=none"):
            overrides = (*space.overrides(space.probes()[0]), override)
            composed = CommandLine(overrides, config_dir=_config_dir(start.settings)).compose()
            settings = {**vars(composed.config.checkpoint), "memory_every": 0}
            alternatives[override] = ResolvedCheckpoint(**settings)
    refuse(savings, trials, at_once, alternatives)


def _cost(request: Request, plan: Json) -> tuple[float, int]:
    """Return the planned seconds that are left of a trial, and its ranks."""
    from nanoscale.runs import metrics

    trained = metrics.last(request.run) if request.repeats else None
    steps = request.config.train.steps - (trained["step"] if trained else 0)
    return plan["step_time_s"] * steps, request.config.world_size
