"""`nanoscale train`: from a recipe to a trained model."""

from __future__ import annotations

from nanoscale.cli.common import options as opt
from nanoscale.cli.common.rehearsal import with_program
from nanoscale.cli.common.request import LAUNCH, CommandLine, Refusals, request_new_run, requesting


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

    refusals = Refusals(postponed=dry_run)
    request = request_new_run(line, refusals, force=force, fetch=not dry_run)
    request = with_program(request, rehearse=rehearse, force=force)
    if dry_run:
        return show_plan(request.run, request, 1, refusals, as_json)
    with Signals() as signals, ready_fleet(request, signals) as fleet, new_run(request) as lock:
        return attempt(lock, request, 1, fleet, signals, as_json)
