"""`nanoscale submit`: the same job through SLURM, or many at once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from nanoscale.cli.common import options as opt
from nanoscale.cli.common.output import DONE, print_json
from nanoscale.cli.common.rehearsal import with_program
from nanoscale.cli.common.request import (
    CommandLine,
    Refusals,
    planned,
    request_job,
    requesting,
    require_disk,
)

if TYPE_CHECKING:
    from nanoscale.config.composing.compose import Setting
    from nanoscale.config.values.provenance import Composed
    from nanoscale.launch.request import Request


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
    """Submit a job to SLURM; lists of values make an array."""
    from nanoscale.config.composing.variants import expand
    from nanoscale.launch.submission.batch_job import batch_job
    from nanoscale.view.run import launch_text as text

    variants = expand(line.overrides or [])
    line = replace(line, overrides=variants[0].words, options=through_slurm(line.options))
    line.require_startable()
    line = replace(line, trust=True)
    requests = [
        request_for_slurm(replace(line, overrides=one.words), fetch=not dry_run) for one in variants
    ]
    refusals = Refusals(postponed=dry_run)
    requests = [planned(request, refusals, force=force) for request in requests]
    requests = [with_program(one, rehearse=rehearse, force=force) for one in requests]
    for request in requests:
        require_disk(request, refusals, force=force)
    batch = batch_job(requests, at_once)
    with refusals.gather():
        batch.check()
    batch.require_one_script()
    if dry_run:
        if as_json:
            print_json({**text.script_document(batch, variants), **refusals.document()})
        else:
            text.print_script(batch, variants)
        return refusals.show()
    job = batch.submit()
    if as_json:
        print_json(text.submission_document(batch, variants, job))
    else:
        text.print_submission(batch, variants, job)
    return DONE


def through_slurm(options: Mapping[str, Setting]) -> dict[str, Setting]:
    """Return the options with SLURM as the launcher."""
    from nanoscale.config.composing.compose import Setting
    from nanoscale.config.values.provenance import COMMAND_LINE

    return {"launcher.name": Setting("slurm", f"{COMMAND_LINE}: submit"), **options}


def request_for_slurm(line: CommandLine, *, fetch: bool) -> Request:
    """Return one run, checked against the nodes to request from SLURM; `fetch` as in `with_weights`."""
    from nanoscale.launch.preflight.pretrained import with_weights
    from nanoscale.launch.slurm.allocation import requested_nodes

    request = request_job(line, verify=_refuse_other_launchers, hosts=requested_nodes)
    checked = with_weights(request.composed, request.config, fetch=fetch)
    resolved = replace(
        checked,
        launcher=replace(checked.launcher, devices=request.hosts[0].slots),
        run=replace(checked.run, root=str(Path(checked.run.root).absolute())),
    )
    return replace(request, config=resolved)


def _refuse_other_launchers(composed: Composed) -> None:
    """Refuse another launcher that was chosen explicitly, instead of ignoring it silently."""
    from nanoscale.common.errors import Violation
    from nanoscale.config.violations import refuse

    before = composed.history["launcher.name"][:-1]
    file = re.sub(r":[0-9]+$", "", before[-1].source)
    if before[-1].value != "slurm" and file not in composed.unasked:
        message = "is chosen, and submit launches through SLURM"
        value, source = before[-1].value, before[-1].source
        refuse([Violation("launcher.name", value, source, message, ("launcher=slurm",))])
