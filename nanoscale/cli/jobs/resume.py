"""`nanoscale resume`: continue a run that was stopped, failed, or is to train longer."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from nanoscale.cli.common import options as opt
from nanoscale.cli.common.output import DONE, print_json
from nanoscale.cli.common.request import (
    LAUNCH,
    CommandLine,
    Refusals,
    planned,
    request_job,
    requesting,
    require_disk,
)
from nanoscale.common import display

if TYPE_CHECKING:
    from nanoscale.config.resolved import ResolvedConfig
    from nanoscale.config.values.provenance import Composed
    from nanoscale.launch.request import Request
    from nanoscale.runs.directory import RunDirectory


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
    from nanoscale.launch.lifecycle.continuation import completion, is_complete, starting_point
    from nanoscale.launch.lifecycle.prepare import replace_configuration
    from nanoscale.runs.directory import RunDirectory
    from nanoscale.runs.lock import RunLock, refuse_if_held

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
        request = _request(directory, line)
        previous = load(directory.config)
        complete = is_complete(directory, previous, request.config)
        if complete and not dry_run:
            _say_complete(directory, request.config, as_json)
            return DONE
        changes = differences(previous, request.config)
        for key, (was, now) in changes.items():
            display.note(f"{key}: {shown(was)} → {shown(now)}")
        require_disk(request, refusals, force=force or complete)
        # An unchanged run continues, whatever the prediction.
        request = planned(request, refusals, force=force or complete or not changes)
        if complete:
            display.note(completion(directory, request.config))
        else:
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
    """Return the request of the run's configuration with the changes.

    Raises:
        UserError: the changes are wrong, or would make it another run.
    """
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


def _say_complete(run: RunDirectory, config: ResolvedConfig, as_json: bool) -> None:
    from nanoscale.launch.lifecycle.attempt import Outcome
    from nanoscale.launch.lifecycle.continuation import completion
    from nanoscale.view.run.outcome_text import document

    (display.note if as_json else display.show)(completion(run, config))
    if as_json:
        print_json(document(run, Outcome("completed", DONE)))
