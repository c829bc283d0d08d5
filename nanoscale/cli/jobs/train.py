"""`nanoscale train`: one job from its overrides to its end, here or on hosts."""

from nanoscale.cli.common import options as opt
from nanoscale.cli.common.output import FAILED
from nanoscale.cli.common.rehearsal import conforms
from nanoscale.cli.common.request import LAUNCH, CommandLine, Refusals, request_new_run, requesting


@requesting("config", "config_dir", *LAUNCH)
def train(
    line: CommandLine,
    dry_run: opt.DryRun = False,
    force: opt.Force = False,
    rehearse: opt.Rehearse = False,
    conform: bool = opt.flag(
        "Compare the layout with one process first; launch only if they agree", "--conform"
    ),
    quiet: opt.Quiet = False,
    as_json: opt.AsJson = False,
) -> int:
    """Check, plan, launch and follow a job until its end."""
    from nanoscale.cli.jobs.launching import launch  # here, so that --help loads no launcher

    opt.refuse_unused(
        (dry_run, "starts processes, and --dry-run starts none", {"--conform": conform})
    )
    # Asked before anything is checked: of several such processes, only the first may launch.
    if line.compose_settings().config.launcher.name == "env":
        from nanoscale.cli.jobs.launching import train_as_one_of_many

        alone = "is for one launcher: type `nanoscale conform` with the same words first"
        opt.refuse_unused((True, alone, {"--conform": conform}))
        return train_as_one_of_many(line, dry_run, as_json, force=force, rehearse=rehearse)
    # Composed, checked and planned before a process starts: a refused job has cost nothing and left no file.
    refusals = Refusals(postponed=dry_run)
    request = request_new_run(line, refusals, force=force, rehearse=rehearse, fetch=not dry_run)
    if conform and not conforms(request.config):
        return FAILED
    # No lock is held: the launch creates the run once the hosts are ready.
    return launch(request.run, request, None, refusals, as_json, quiet=quiet)
