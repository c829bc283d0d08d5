"""`nanoscale sweep`: many trainings of one command line, each with other values."""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from nanoscale.cli.common import options as opt
from nanoscale.cli.common.output import DONE, FAILED, exit_code_of_signal, print_json
from nanoscale.cli.common.request import CommandLine, Refusals, planned, request_job
from nanoscale.common import display
from nanoscale.common.errors import UserError

if TYPE_CHECKING:
    from nanoscale.common.errors import Violation
    from nanoscale.launch.request import Request
    from nanoscale.sweep.samplers import Source
    from nanoscale.sweep.space import Space
    from nanoscale.sweep.sweep import Settings, State, Sweep, Trial

_PLANNED = 3
"""Trials of a sampler that are checked before the first starts: the ends of its intervals, and the middle."""


def sweep(
    overrides: opt.Overrides = None,
    name: Annotated[
        str | None,
        typer.Option(help="Name the sweep and its folder", show_default="the recipe and the time"),
    ] = None,
    root: Annotated[Path, typer.Option(help="Keep sweeps in this folder")] = Path("sweeps"),
    resume: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Run what is missing of a sweep", show_default=False),
    ] = None,
    retry: Annotated[
        bool, typer.Option("--retry", help="Resume trials that have failed, too")
    ] = False,
    sampler: Annotated[
        Literal["grid", "random", "tpe"], typer.Option(help="Choose values by this method")
    ] = "grid",
    trials: Annotated[
        int | None,
        typer.Option(min=1, help="Limit the trials of a sampler", show_default=False),
    ] = None,
    pruner: Annotated[
        Literal["none", "median", "asha"],
        typer.Option(help="Stop bad trials of a sampler early by this method"),
    ] = "none",
    metric: Annotated[
        str, typer.Option(help="Minimize this figure of metrics.jsonl with a sampler")
    ] = "eval_loss",
    at_once: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Run this many trials at once", show_default="as GPUs allow"
        ),
    ] = None,
    slurm: Annotated[
        bool, typer.Option("--slurm", help="Run the trials as an array of SLURM jobs")
    ] = False,
    config_dir: opt.ConfigDir = None,
    dry_run: opt.DryRun = False,
    force: opt.Force = False,
    as_json: opt.AsJson = False,
) -> int:
    """Train once for each combination of values, as in `optimizer.lr=1e-3,3e-4 train.seed=1,2`."""
    from nanoscale.sweep.space import read_space
    from nanoscale.sweep.sweep import Settings, Sweep

    words = overrides or []
    if resume is not None:
        _refuse_new_values(words, slurm)
        existing = Sweep(_folder(root, resume))
        settings, known = existing.read()
        return _run(existing, settings, known, at_once, dry_run, force, as_json, retry)
    settings = Settings(
        list(words),
        sampler,
        trials,
        pruner,
        metric,
        config_dir=str(config_dir.absolute()) if config_dir else None,
        slurm=slurm,
    )
    space = read_space(words, config_dir)
    _check_sampler(settings, space)
    new = Sweep(_folder(root, name or _default_name(words)))
    if new.file.exists():
        earlier, known = new.read()
        _require_same(new, earlier, settings)
        return _run(new, settings, known, at_once, dry_run, force, as_json, retry)
    return _run(new, settings, None, at_once, dry_run, force, as_json, retry)


def _run(
    sweep: Sweep,
    settings: Settings,
    known: list[Trial] | None,
    at_once: int | None,
    dry_run: bool,
    force: bool,
    as_json: bool,
    retry: bool,
) -> int:
    """Check and plan the trials, and run those that are missing.

    Args:
        known: the trials of a sweep that exists; None: it is new.
    """
    from nanoscale.launch.fleet.signals import Signals
    from nanoscale.sweep.runner import Runner
    from nanoscale.sweep.space import read_space
    from nanoscale.view.run.sweep_table import SweepTable, print_table

    config_dir = Path(settings.config_dir) if settings.config_dir else None
    space = read_space(settings.words, config_dir)
    trials = _trials(space, settings) if known is None else known
    requests = _checked(sweep, space, settings, trials, force, fetch=not dry_run)
    slots, devices = _slots(requests, at_once)
    _say_plan(sweep, settings, requests, trials, slots)
    if dry_run:
        rows = [{"trial": one.name, **one.values} for one in trials]
        if as_json:
            print_json({"sweep": str(sweep.path), "trials": rows, "at_once": slots})
        else:
            for row in rows:
                display.show(row["trial"])
            display.note(f"this would be {sweep.path}; nothing was written or started")
        return DONE
    if settings.slurm:
        return _run_array(sweep, settings, known, trials, requests, at_once, as_json, retry)
    if known is None:
        sweep.create(settings, trials)
    with (
        sweep.held(),
        Signals() as signals,
        SweepTable(sys.stderr if as_json else sys.stdout) as view,
    ):
        last_rows: list[dict[str, Any]] = []
        shown_at = 0.0

        def show(current: Sequence[Trial], changed: bool) -> None:
            nonlocal shown_at, last_rows
            if changed or time.monotonic() - shown_at > 1.0:
                shown_at = time.monotonic()
                last_rows = [sweep.row(one) for one in current]
                view.show(last_rows)
                if changed:
                    sweep.keep_table(last_rows)

        source = _source(sweep, space, settings)
        runner = Runner(
            sweep,
            settings,
            space,
            source,
            trials,
            slots,
            devices,
            show,
            arguments=["--force"] if force else [],
            again=retry,
        )
        whole = runner.run(signals)
    rows = [sweep.row(one) for one in runner.trials]
    sweep.keep_table(rows)
    if as_json:
        print_json({"sweep": str(sweep.path), "trials": rows})
    else:
        print_table(rows, sys.stdout)
    _say_end(sweep, settings, rows, whole)
    if signals.first is not None and not whole:
        return exit_code_of_signal(signals.first)
    return DONE if all(row["state"] in ("completed", "pruned") for row in rows) else FAILED


def _run_array(
    sweep: Sweep,
    settings: Settings,
    known: list[Trial] | None,
    trials: Sequence[Trial],
    requests: Sequence[Request],
    at_once: int | None,
    as_json: bool,
    retry: bool,
) -> int:
    """Submit the missing trials to SLURM, and show all of them until they have ended."""
    from nanoscale.launch.fleet.signals import Signals
    from nanoscale.sweep import slurm_array
    from nanoscale.view.run.sweep_table import SweepTable, print_table

    if shutil.which("sbatch") is None:
        raise UserError("slurm", "sbatch is not installed here; run the sweep on a login node")
    if known is None:
        sweep.create(settings, trials)
    with sweep.held():
        with _taken_back(sweep if known is None else None):
            now = slurm_array.states(sweep, trials)
            chosen = slurm_array.missing(sweep, trials, now, retry=retry)
            jobs = slurm_array.submit(sweep, chosen, requests, at_once)
        for job in jobs:
            display.note(f"queued as job {job.job}; to end it: scancel {shlex.quote(job.job)}")
        rows: list[dict[str, Any]] = []
        with Signals() as signals, SweepTable(sys.stderr if as_json else sys.stdout) as view:

            def show(states: Sequence[State]) -> None:
                nonlocal rows
                rows = [sweep.row(one, state) for one, state in zip(trials, states, strict=True)]
                view.show(rows)
                sweep.keep_table(rows)

            whole = slurm_array.follow(sweep, trials, signals, show)
    rows = rows or [sweep.row(one) for one in trials]
    if as_json:
        print_json({"sweep": str(sweep.path), "trials": rows, "jobs": [job.job for job in jobs]})
    else:
        print_table(rows, sys.stdout)
    _say_end(sweep, settings, rows, whole)
    if signals.first is not None and not whole:
        return exit_code_of_signal(signals.first)
    return DONE if all(row["state"] == "completed" for row in rows) else FAILED


@contextmanager
def _taken_back(new: Sweep | None) -> Iterator[None]:
    """Remove a new sweep's folder if SLURM does not take its trials.

    Raises:
        UserError: SLURM cannot be asked here, or has refused.
    """
    from nanoscale.launch.slurm.slurm import SlurmError

    try:
        yield
    except (SlurmError, UserError) as error:
        if new is not None:
            shutil.rmtree(new.path)
        if isinstance(error, UserError):
            raise
        raise UserError("slurm", f"SLURM cannot be asked here: {error}") from error


# --- the request ----------------------------------------------------------------------------------


def _folder(root: Path, name: str) -> Path:

    if name != Path(name).name or name.startswith((".", "-")):
        raise UserError("usage", f"--name {name}: must be the name of a folder, without a slash")
    return root.expanduser().absolute() / name


def _default_name(words: Sequence[str]) -> str:
    recipes = [word.partition("=")[2] for word in words if word.startswith("recipe=")]
    first = Path(recipes[-1]).stem if recipes and "," not in recipes[-1] else "sweep"
    return f"{first}-{time.strftime('%Y%m%d-%H%M%S')}"


def _refuse_new_values(words: Sequence[str], slurm: bool) -> None:

    if slurm:
        raise UserError(
            "usage", "--resume runs the trials where the sweep ran them; remove --slurm"
        )
    if words:
        raise UserError(
            "usage", "--resume takes no overrides: the sweep's own are in its sweep.json"
        )


def _require_same(sweep: Sweep, earlier: Settings, settings: Settings) -> None:
    from nanoscale.common.errors import Violation
    from nanoscale.sweep.sweep import same_request

    if not same_request(earlier, settings):
        message = f"the sweep {sweep.name} exists already, with other values or options"
        line = shlex.join(["nanoscale", "sweep", "--resume", sweep.name])
        violation = Violation("--name", sweep.name, "command line", message, (line,))
        raise UserError("usage", message, [violation])


def _check_sampler(settings: Settings, space: Space) -> None:
    """Refuse options of samplers that do not fit together, and a sampler that is not installed."""
    from importlib.util import find_spec

    from nanoscale.common.versions import install_command

    if settings.slurm and settings.sampler != "grid":
        raise UserError("usage", f"--slurm runs a grid; remove --sampler {settings.sampler}")
    if settings.sampler == "grid":
        given = {"--trials": settings.trials is not None, "--pruner": settings.pruner != "none"}
        for option, is_given in given.items():
            if is_given:
                raise UserError("usage", f"{option} needs --sampler random or --sampler tpe")
        space.grid()
        return
    if settings.trials is None:
        raise UserError("usage", f"--sampler {settings.sampler} needs --trials N")
    if find_spec("optuna") is None:
        how = install_command("optuna")
        raise UserError("usage", f"--sampler {settings.sampler} needs Optuna: {how}")


def _trials(space: Space, settings: Settings) -> list[Trial]:
    """Return the trials of a new grid; a sampler proposes its own one by one."""
    from nanoscale.sweep.sweep import Trial, free_name

    if settings.sampler != "grid":
        return []
    trials: list[Trial] = []
    for values in space.grid():
        name = free_name(space.name(values), {one.name for one in trials})
        trials.append(Trial(name, values))
    return trials


def _source(sweep: Sweep, space: Space, settings: Settings) -> Source:
    from nanoscale.sweep.samplers import Grid, Study

    return Grid() if settings.sampler == "grid" else Study(sweep, space, settings)


def _probes(space: Space) -> list[dict[str, str]]:
    """Return values at the ends and in the middle of what a sampler draws from."""
    found = []
    for share in range(_PLANNED):
        values = {}
        for one in space.dimensions:
            if one.interval is None:
                values[one.key] = one.values[share * (len(one.values) - 1) // (_PLANNED - 1)]
            else:
                width = one.interval.high - one.interval.low
                number = one.interval.low + width * share / (_PLANNED - 1)
                values[one.key] = str(round(number)) if one.interval.integer else f"{number:.6g}"
        found.append(values)
    return found


def _checked(
    sweep: Sweep,
    space: Space,
    settings: Settings,
    trials: Sequence[Trial],
    force: bool,
    *,
    fetch: bool,
) -> list[Request]:
    """Check and plan every trial that has no run yet; `fetch` as in `request_for_slurm`.

    Raises:
        UserError: with what is wrong in any of them.
    """

    config_dir = Path(settings.config_dir) if settings.config_dir else None
    if settings.sampler == "grid":
        wanted = [(one.name, one.values) for one in trials if not sweep.run(one).config.exists()]
    else:
        wanted = [(space.name(values), values) for values in _probes(space)]
    requests: list[Request] = []
    wrong: dict[str, Violation] = {}
    kinds: list[str] = []
    bad: list[str] = []
    for name, values in wanted:
        line = CommandLine(space.words(values), config_dir=config_dir)
        try:
            checked = _for_slurm(sweep, name, line, fetch) if settings.slurm else request_job(line)
            requests.append(planned(checked, Refusals(), force=force))
        except UserError as error:
            bad.append(name)
            kinds.append(error.kind)
            for violation in error.violations or []:
                wrong.setdefault(str(violation), violation)
            if not error.violations:
                raise
    if bad:
        named = ", ".join(bad[:3]) + (", …" if len(bad) > 3 else "")
        message = f"{len(bad)} of {len(wanted)} trials cannot run ({named})"
        kind = "plan" if set(kinds) == {"plan"} else next(it for it in kinds if it != "plan")
        raise UserError(kind, message, list(wrong.values()))
    return requests


def _for_slurm(sweep: Sweep, name: str, line: CommandLine, fetch: bool) -> Request:
    """Return the request of a trial that runs in a SLURM job."""
    from nanoscale.cli.jobs.submit import request_for_slurm, through_slurm
    from nanoscale.config.composing.compose import Setting

    placed = {
        "run.name": Setting(name, "sweep"),
        "run.root": Setting(str(sweep.runs), "sweep"),
    }
    options = {**through_slurm(line.options), **placed}
    return request_for_slurm(replace(line, options=options, trust=True), fetch=fetch)


def _slots(requests: Sequence[Request], at_once: int | None) -> tuple[int, list[list[int]]]:
    """Return how many trials run at once, and the GPUs of each.

    Raises:
        UserError: this machine has no devices for that many.
    """
    from nanoscale.launch.transport.transport import transport_of

    if not requests:
        return at_once or 1, []
    config = requests[0].config
    if not transport_of(config).is_local or config.launcher.device != "cuda":
        return at_once or 1, []
    ranks = max(one.config.world_size for one in requests)
    room = max(1, requests[0].devices.count // ranks)
    if at_once is not None and at_once > room:
        raise UserError(
            "usage",
            f"--at-once {at_once}: {requests[0].devices.count} GPUs have room for {room} trials of "
            f"{ranks} ranks",
        )
    slots = at_once or room
    return slots, [list(range(slot * ranks, (slot + 1) * ranks)) for slot in range(slots)]


# --- output ---------------------------------------------------------------------------------------


def _say_plan(
    sweep: Sweep,
    settings: Settings,
    requests: Sequence[Request],
    trials: Sequence[Trial],
    slots: int,
) -> None:
    """Say how many trials are left, and how long they take by the plan."""
    from nanoscale.common.units import duration

    count = len(trials) if settings.sampler == "grid" else settings.trials or 0
    text = f"sweep {sweep.name}: {count} trials, {slots} at once"
    seconds = [
        one.plan["step_time_s"] * one.config.train.steps for one in requests if one.plan is not None
    ]
    if seconds:
        left = len(requests) if settings.sampler == "grid" else count
        mean = sum(seconds) / len(seconds)
        ranks = max(one.config.world_size for one in requests)
        text += (
            f"; the plan expects {duration(mean)} each, {duration(mean * left / slots)} for "
            f"{left} of them, {mean * left * ranks / 3600:.3g} device hours"
        )
    display.note(text)


def _say_end(sweep: Sweep, settings: Settings, rows: Sequence[dict[str, Any]], whole: bool) -> None:
    from nanoscale.sweep.runner import log_tail
    from nanoscale.sweep.sweep import Trial

    def figure(row: dict[str, Any]) -> float | None:
        value = row["eval_loss"] if row["eval_loss"] is not None else row["loss"]
        return value if row["state"] == "completed" else None

    best = min((row for row in rows if figure(row) is not None), key=figure, default=None)  # type: ignore[arg-type]
    if best is not None:
        kind = "evaluation loss" if best["eval_loss"] is not None else "loss"
        display.note(f"lowest {kind}: {best['trial']} with {figure(best):.4f}")
    for row in [row for row in rows if row["state"] == "failed"][:3]:
        log = sweep.log(Trial(row["trial"], {}))
        display.note(f"{row['trial']} failed; its output is in {log}")
        for line in log_tail(log, 3):
            display.note(f"  {line}")
    if not whole:
        what = (
            "the jobs continue; to follow them"
            if settings.slurm
            else "stopped; to run what is missing"
        )
        display.note(f"{what}: nanoscale sweep --resume {shlex.quote(sweep.name)}")
    display.note(f"the table is in {sweep.path / 'results.csv'}")
