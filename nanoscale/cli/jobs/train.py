"""`nanoscale train`: one job from its overrides to its end, here or on hosts."""

from __future__ import annotations

from nanoscale.cli.common import options as opt
from nanoscale.cli.common.request import LAUNCH, CommandLine, Refusals, request_new_run, requesting


@requesting("config", "config_dir", *LAUNCH)
def train(
    line: CommandLine,
    dry_run: opt.DryRun = False,
    force: opt.Force = False,
    rehearse: opt.Rehearse = False,
    quiet: opt.Quiet = False,
    as_json: opt.AsJson = False,
) -> int:
    """Check, plan, launch and follow a job until its end."""
    from nanoscale.cli.jobs.launching import launch  # here, so that --help loads no launcher

    # Asked before anything is checked: of several such processes, only the first may launch.
    if line.compose_settings().config.launcher.name == "env":
        from nanoscale.cli.jobs.outer import train_as_one_of_many

        return train_as_one_of_many(line, dry_run, as_json, force=force, rehearse=rehearse)
    # Composed, checked and planned before a process starts: a refused job has cost nothing and left no file.
    refusals = Refusals(postponed=dry_run)
    request = request_new_run(line, refusals, force=force, rehearse=rehearse, fetch=not dry_run)
    # The attempt is number 1, and no lock is held: the launch creates the run once the hosts are ready.
    return launch(request.run, request, 0, None, refusals, as_json, quiet=quiet)
