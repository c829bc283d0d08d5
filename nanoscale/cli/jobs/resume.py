"""`nanoscale resume`: the next attempt of a run that exists."""

from __future__ import annotations

import shlex
from collections.abc import Callable
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
from nanoscale.launch.fleet.signals import Signals
from nanoscale.runs.directory import RunDirectory

if TYPE_CHECKING:
    from nanoscale.config.machines import Host
    from nanoscale.config.values.provenance import Composed
    from nanoscale.launch.request import Request


@requesting(*LAUNCH)
def resume(
    run: opt.Run,
    line: CommandLine,
    dry_run: opt.DryRun = False,
    force: opt.Force = False,
    quiet: opt.Quiet = False,
    as_json: opt.AsJson = False,
) -> int:
    """Resume from the newest complete checkpoint, in any layout."""
    from nanoscale.cli.jobs.launching import launch, show_changes, show_start
    from nanoscale.config.composing.frozen import load
    from nanoscale.launch.lifecycle import continuation
    from nanoscale.launch.lifecycle.attempt import Outcome
    from nanoscale.runs.lock import RunLock, refuse_if_held
    from nanoscale.view.run.outcome_text import document

    directory = RunDirectory.open(run)
    line = replace(line, config_file=directory.config)
    line.require_startable()
    line = replace(line, trust=True)
    refusals = Refusals(postponed=dry_run)
    with ExitStack() as held:
        lock = signals = None
        if dry_run:
            with refusals.gather():
                refuse_if_held(directory)
        else:
            lock, signals = held.enter_context(RunLock(directory)), held.enter_context(Signals())
        previous = load(directory.config)
        fetched = continuation.fetch_missing(directory, previous.checkpoint.upload, dry_run=dry_run)
        request = next_request(directory, line)
        complete = continuation.is_complete(directory, previous, request.config)
        if complete and not dry_run:
            continuation.upload_missing(directory, request.config.checkpoint.upload)
            (display.note if as_json else display.show)(continuation.completion(directory))
            if as_json:
                print_json(document(directory, Outcome("completed", DONE)))
            return DONE
        changed = show_changes(previous, request.config)
        require_disk(request, refusals, force=force or complete)
        # An unchanged run continues, whatever the prediction.
        request = planned(request, refusals, force=force or complete or not changed)
        if complete:
            display.note(continuation.completion(directory))
        elif not (fetched and dry_run):
            with refusals.gather():
                show_start(directory)
        return launch(directory, request, lock, refusals, as_json, signals, quiet=quiet)


def next_request(
    run: RunDirectory,
    line: CommandLine,
    hosts: Callable[[Composed], tuple[Host, ...]] | None = None,
) -> Request:
    """Return the request of the run's configuration with the changes, which must not make it another run.

    Args:
        hosts: returns the nodes that a batch system will be asked for; None: the job starts here.
    """
    from nanoscale.checkpoint.hf.adapters import require_base
    from nanoscale.config.composing.frozen import load
    from nanoscale.config.rules.launcher import BATCH_NAMES
    from nanoscale.launch.batch.allocation import nodes_of_job
    from nanoscale.launch.lifecycle import continuation

    def verify(composed: Composed) -> None:
        if hosts is None and composed.config.launcher.name in BATCH_NAMES:
            resubmission = ["nanoscale", "submit", "--resume", run.reference, *line.changes]
            nodes_of_job(composed, shlex.join(resubmission))
        if note := continuation.require_recorded(run, composed):
            display.note(note)

    request = request_job(line, verify=verify, hosts=hosts)
    continuation.require_same_run(run, request, line.overrides or ())
    if request.config.lora.rank:
        require_base(request.config, run.checkpoints)
    return replace(request, config=replace(request.config, run=load(run.config).run))
