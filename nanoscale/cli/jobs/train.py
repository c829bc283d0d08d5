"""`nanoscale train`, `resume` and `submit`: one job, here, on hosts or through a batch system."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from nanoscale.cli.common import options as opt
from nanoscale.cli.common.described_machines import on_described_nodes
from nanoscale.cli.common.output import DONE, answer, print_json
from nanoscale.cli.common.request import (
    LAUNCH,
    CommandLine,
    Refusals,
    planned,
    request_job,
    request_new_run,
    requesting,
    require_disk,
)
from nanoscale.common import display
from nanoscale.common.errors import UserError, Violation

if TYPE_CHECKING:
    from nanoscale.config.values.provenance import Composed
    from nanoscale.launch.request import Request
    from nanoscale.runs.directory import RunDirectory


@requesting("config", "config_dir", *LAUNCH)
def train(
    line: CommandLine,
    dry_run: opt.DryRun = False,
    force: opt.Force = False,
    rehearse: opt.Rehearse = False,
    as_json: opt.AsJson = False,
) -> int:
    """Check, plan, launch and follow a job until its end."""
    from nanoscale.cli.jobs.launching import attempt, ready_fleet, show_plan
    from nanoscale.launch.fleet.signals import Signals
    from nanoscale.launch.lifecycle.prepare import new_run

    if _launches_outside(line):
        from nanoscale.cli.jobs.outer import train_as_one_of_many

        return train_as_one_of_many(line, dry_run, as_json, force=force, rehearse=rehearse)
    refusals = Refusals(postponed=dry_run)
    request = request_new_run(line, refusals, force=force, rehearse=rehearse, fetch=not dry_run)
    if dry_run:
        return show_plan(request.run, request, 1, refusals, as_json)
    with Signals() as signals, ready_fleet(request, signals) as fleet, new_run(request) as lock:
        return attempt(lock, request, 1, fleet, signals, as_json)


def _launches_outside(line: CommandLine) -> bool:
    """True if another program has started this process for launcher=env."""
    from nanoscale.launch.hosts.outer_processes import is_follower

    try:
        return line.compose_settings().config.launcher.name == "env"
    except UserError:
        if not is_follower():
            raise
        return True  # the first process says what is wrong


@requesting(*LAUNCH)
def resume(
    run: opt.Run,
    line: CommandLine,
    dry_run: opt.DryRun = False,
    force: opt.Force = False,
    as_json: opt.AsJson = False,
) -> int:
    """Resume from the newest complete checkpoint, in any layout."""
    from nanoscale.cli.jobs.launching import attempt, ready_fleet, show_plan
    from nanoscale.config.composing.frozen import load
    from nanoscale.config.resolved import differences
    from nanoscale.config.violations import shown
    from nanoscale.launch.fleet.signals import Signals
    from nanoscale.launch.lifecycle.attempt import Outcome
    from nanoscale.launch.lifecycle.continuation import (
        completion,
        fetch_missing,
        is_complete,
        starting_point,
        upload_missing,
    )
    from nanoscale.launch.lifecycle.prepare import replace_configuration
    from nanoscale.runs.directory import RunDirectory
    from nanoscale.runs.lock import RunLock, refuse_if_held
    from nanoscale.view.run.outcome_text import document

    directory = RunDirectory.open(run)
    line = replace(line, config_file=directory.config)
    line.require_startable()
    line = replace(line, trust=True)
    refusals = Refusals(postponed=dry_run)
    with ExitStack() as held:
        if dry_run:
            with refusals.gather():
                refuse_if_held(directory)
        else:
            lock, signals = held.enter_context(RunLock(directory)), held.enter_context(Signals())
        previous = load(directory.config)
        fetched = fetch_missing(directory, previous.checkpoint.upload, dry_run=dry_run)
        request = _request(directory, line)
        complete = is_complete(directory, previous, request.config)
        if complete and not dry_run:
            upload_missing(directory, request.config.checkpoint.upload)
            (display.note if as_json else display.show)(completion(directory, request.config))
            if as_json:
                print_json(document(directory, Outcome("completed", DONE)))
            return DONE
        changes = differences(previous, request.config)
        for key, (was, now) in changes.items():
            display.note(f"{key}: {shown(was)} → {shown(now)}")
        require_disk(request, refusals, force=force or complete)
        # An unchanged run continues, whatever the prediction.
        request = planned(request, refusals, force=force or complete or not changes)
        if complete:
            display.note(completion(directory, request.config))
        elif not (fetched and dry_run):
            with refusals.gather():
                for sentence in starting_point(directory):
                    display.note(sentence)
        last = directory.last_attempt()
        if dry_run:
            return show_plan(directory, request, last + 1, refusals, as_json)
        with ready_fleet(request, signals) as fleet:
            lock.require()
            replace_configuration(directory, request, last)
            return attempt(lock, request, last + 1, fleet, signals, as_json)


def _request(run: RunDirectory, line: CommandLine) -> Request:
    """Return the request of the run's configuration with the changes, which must not make it another run."""
    from nanoscale.checkpoint.hf.adapters import require_base
    from nanoscale.config.composing.frozen import load
    from nanoscale.launch.lifecycle.continuation import require_recorded, require_same_run

    def verify(composed: Composed) -> None:
        if note := require_recorded(run, composed):
            display.note(note)

    request = request_job(line, verify=verify)
    require_same_run(run, request, line.overrides or ())
    if request.config.lora.rank:
        require_base(request.config, run.checkpoints)
    return replace(request, config=replace(request.config, run=load(run.config).run))


@requesting("config", "config_dir", "num_nodes", "num_gpus", "no_preflight", "trust")
def submit(
    line: CommandLine,
    at_once: int | None = opt.option(
        "Limit how many runs of an array (train.seed=1,2,3) run at once", metavar="N", min=1
    ),
    dry_run: opt.DryRun = False,
    force: opt.Force = False,
    rehearse: opt.Rehearse = False,
    as_json: opt.AsJson = False,
) -> int:
    """Submit a job to SLURM, PBS or LSF; lists of values make an array (SLURM)."""
    from nanoscale.config.composing.variants import expand
    from nanoscale.config.rules.launcher import BATCH_NAMES
    from nanoscale.launch.submission.batch_job import batch_job
    from nanoscale.view.run import launch_text as text

    variants = expand(line.overrides or [])
    first = replace(line, overrides=variants[0].words)
    if first.compose_settings().config.launcher.name in ORCHESTRATORS:
        return _write_file(line, dry_run, force, as_json)
    line = through_batch(first, BATCH_NAMES)
    line.require_startable()
    line = replace(line, trust=True)
    requests = [
        request_for_batch(replace(line, overrides=one.words), fetch=not dry_run) for one in variants
    ]
    refusals = Refusals(postponed=dry_run)
    requests = [planned(one, refusals, force=force, rehearse=rehearse) for one in requests]
    for request in requests:
        require_disk(request, refusals, force=force)
    batch = batch_job(requests, at_once)
    with refusals.gather():
        batch.check()
    batch.require_one_script()
    if dry_run:
        document = {**text.script_document(batch, variants), **refusals.document()}
        answer(as_json, document, text.print_script, batch, variants)
        return refusals.show()
    job = batch.submit()
    document = text.submission_document(batch, variants, job)
    answer(as_json, document, text.print_submission, batch, variants, job)
    return DONE


ORCHESTRATORS = ("kubernetes", "skypilot")


def _write_file(line: CommandLine, dry_run: bool, force: bool, as_json: bool) -> int:
    """Print the file of a job for Kubernetes or SkyPilot."""
    from nanoscale.config.values.yaml_file import to_yaml
    from nanoscale.launch.batch.allocation import requested_nodes
    from nanoscale.launch.lifecycle.prepare import name_run
    from nanoscale.launch.submission.orchestrators import render

    if not dry_run or line.config_file is not None:
        what = "a file is written with --dry-run, of overrides and without --config"
        how = "pass it on with `kubectl apply -f FILE`, or `sky launch FILE`"
        raise UserError("usage", f"{what}; {how}")
    request = request_job(on_described_nodes(line), starts=False, hosts=requested_nodes)
    refusals = Refusals(postponed=True)
    named = name_run(request.composed, request.config, repeats=False)
    request = planned(replace(request, config=named), refusals, force=force)
    document = render(request)
    answer(as_json, document, lambda it: display.content(to_yaml(it)))
    return refusals.show()


def through_batch(line: CommandLine, launchers: Sequence[str] = ("slurm",)) -> CommandLine:
    """Return the line with one of the launchers of batch systems: SLURM, if it chooses none.

    Raises:
        UserError: another launcher was chosen.
    """
    from nanoscale.config.composing.compose import Setting
    from nanoscale.config.values.provenance import COMMAND_LINE
    from nanoscale.config.violations import refuse

    key, composed = "launcher.name", line.compose_settings()
    name = composed.config.launcher.name
    if name in launchers:
        return line
    if composed.asked_for(key):
        message = "is chosen, and submit launches through SLURM"
        refuse([Violation(key, name, composed.source(key), message, ("launcher=slurm",))])
    slurm = Setting("slurm", f"{COMMAND_LINE}: submit")
    return replace(line, options={key: slurm, **line.options})


def request_for_batch(line: CommandLine, *, fetch: bool) -> Request:
    """Return one run, checked against the nodes to request; `fetch` as in `with_weights`."""
    from nanoscale.launch.batch.allocation import requested_nodes
    from nanoscale.launch.preflight.by_library import with_weights

    request = request_job(on_described_nodes(line), hosts=requested_nodes)
    checked = with_weights(request.composed, request.config, fetch=fetch)
    launcher = replace(checked.launcher, devices=request.hosts[0].slots)
    run = replace(checked.run, root=str(Path(checked.run.root).absolute()))
    return replace(request, config=replace(checked, launcher=launcher, run=run))
