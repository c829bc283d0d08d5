"""`nanoscale train`: from a recipe to a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from nanoscale.cli.common import options as opt
from nanoscale.cli.common.options import as_settings
from nanoscale.cli.common.refusals import Refusals
from nanoscale.cli.common.trust import require_trust

if TYPE_CHECKING:
    from nanoscale.config.composing.compose import Setting
    from nanoscale.launch.request import Request


def train(
    overrides: opt.Overrides = None,
    config: opt.ConfigFile = None,
    config_dir: opt.ConfigDir = None,
    hostfile: opt.Hostfile = None,
    include: opt.Include = None,
    exclude: opt.Exclude = None,
    num_nodes: opt.NumNodes = None,
    num_gpus: opt.NumGpus = None,
    no_preflight: opt.NoPreflight = False,
    dry_run: opt.DryRun = False,
    force: opt.Force = False,
    trust: opt.Trust = False,
    as_json: opt.AsJson = False,
) -> int:
    """Check, plan, launch and follow a job until its end."""
    from nanoscale.cli.common.fit import planned, require_disk
    from nanoscale.cli.jobs.attempt import attempt, ready_fleet, show_plan
    from nanoscale.launch.fleet.signals import Signals
    from nanoscale.launch.lifecycle.prepare import new_run

    options = as_settings(hostfile, include, exclude, num_nodes, num_gpus, no_preflight)
    refusals = Refusals(postponed=dry_run)
    request = compose_request(
        overrides or [], config, config_dir, options, refusals, fetch=not dry_run, trust=trust
    )
    request = planned(request, refusals, force=force)
    require_disk(request, refusals, force=force)
    if dry_run:
        return show_plan(request.run, request, 1, refusals, as_json)
    with Signals() as signals, ready_fleet(request, signals) as fleet, new_run(request) as lock:
        return attempt(lock, request, 1, fleet, signals, as_json)


def compose_request(
    words: list[str],
    config: Path | None = None,
    config_dir: Path | None = None,
    options: dict[str, Setting] | None = None,
    refusals: Refusals | None = None,
    *,
    fetch: bool = True,
    trust: bool = False,
) -> Request:
    """Return the request of overrides and options, checked against the machines, with the run's name.

    Args:
        refusals: the receiver of an error if no run can be created; None: raise.
        fetch: True to download the weights of a model that is given by its name.
        trust: run the code and programs that another user's frozen configuration names.
    """
    from dataclasses import replace

    from nanoscale.config.composing.compose import compose
    from nanoscale.launch.lifecycle.prepare import check_new_run, name_run
    from nanoscale.launch.preflight.pretrained import with_weights
    from nanoscale.launch.request import check_request
    from nanoscale.launch.slurm.allocation import note_idle_nodes, require_one_launcher

    require_one_launcher()
    composed = compose(words, config_dir=config_dir, config_file=config, options=options)
    if config is not None:
        require_trust(config, lambda: composed, trust=trust)
    request = check_request(composed, repeats=config)
    note_idle_nodes(request.config.launcher)
    named = name_run(composed, request.config, repeats=config is not None)
    with (refusals or Refusals()).gather():
        check_new_run(named)
    return replace(request, config=with_weights(composed, named, fetch=fetch))
