"""`nanoscale submit`: one job or an array through a batch system, or a file for an orchestrator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from nanoscale.cli.common import options as opt
from nanoscale.cli.common.described_machines import on_described_nodes
from nanoscale.cli.common.output import DONE, answer
from nanoscale.cli.common.request import (
    CommandLine,
    Refusals,
    planned,
    request_job,
    requesting,
    require_disk,
)
from nanoscale.cli.jobs.resume import next_request
from nanoscale.common import display
from nanoscale.common.errors import UserError, Violation
from nanoscale.config.violations import refuse
from nanoscale.runs.directory import RunDirectory

if TYPE_CHECKING:
    from nanoscale.launch.request import Request


@requesting("config", "config_dir", "num_nodes", "num_gpus", "no_preflight", "trust")
def submit(
    line: CommandLine,
    resume: str | None = opt.option(
        "Continue this run, which was stopped, by a new job", metavar="RUN"
    ),
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
    from nanoscale.launch.submission.batch_job import BatchJob, batch_job
    from nanoscale.view.run import launch_text as text

    variants = expand(line.overrides or [])
    run = None if resume is None else RunDirectory.open(resume)
    if run is not None:
        unused = {"--at-once": at_once, "--config": line.config_file, "a list": len(variants) > 1}
        opt.refuse_unused((True, "cannot be used with --resume, which continues one run", unused))
        line = replace(line, config_file=run.config)
    first = replace(line, overrides=variants[0].words)
    if first.compose_settings().config.launcher.name in ORCHESTRATORS:
        return _write_file(line, dry_run, force, as_json)
    line = through_batch(first, BATCH_NAMES)
    line.require_startable()
    line = replace(line, trust=True)
    requests = [
        request_for_batch(replace(line, overrides=one.words), fetch=not dry_run, run=run)
        for one in variants
    ]
    refusals = Refusals(postponed=dry_run)
    requests = [planned(one, refusals, force=force, rehearse=rehearse) for one in requests]
    for request in requests:
        require_disk(request, refusals, force=force)
    resumed = None if run is None else BatchJob(run.name, requests, changes=line.changes)
    batch = resumed or batch_job(requests, at_once)
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
    if request.config.launcher.name == "skypilot":
        display.note(
            f"add what this task does not know: `setup` or an image that installs nanoscale, and a mount of a "
            f"folder that all nodes share as run.root={request.config.run.root}"
        )
    answer(as_json, document, lambda it: display.content(to_yaml(it)))
    return refusals.show()


def through_batch(line: CommandLine, launchers: Sequence[str] = ("slurm",)) -> CommandLine:
    """Return the line with one of the launchers of batch systems: SLURM, if it chooses none.

    Raises:
        UserError: another launcher was chosen.
    """
    from nanoscale.config.composing.compose import Setting
    from nanoscale.config.values.provenance import COMMAND_LINE

    key, composed = "launcher.name", line.compose_settings()
    name = composed.config.launcher.name
    if name in launchers:
        return line
    if composed.asked_for(key):
        message = "is chosen, and submit launches through SLURM"
        refuse([Violation(key, name, composed.source(key), message, ("launcher=slurm",))])
    slurm = Setting("slurm", f"{COMMAND_LINE}: submit")
    return replace(line, options={key: slurm, **line.options})


def request_for_batch(
    line: CommandLine, *, fetch: bool, run: RunDirectory | None = None
) -> Request:
    """Return one run, new or resumed, checked against the nodes to request; `fetch` as in `with_weights`."""
    from nanoscale.launch.batch.allocation import requested_nodes
    from nanoscale.launch.preflight.by_library import with_weights

    line = on_described_nodes(line)
    request = _further_request(run, line) if run else request_job(line, hosts=requested_nodes)
    checked = with_weights(request.composed, request.config, fetch=fetch)
    launcher = replace(checked.launcher, devices=request.hosts[0].slots)
    root = Path(checked.run.root).absolute() if run is None else run.path.parent
    home = replace(checked.run, root=str(root), name=checked.run.name if run is None else run.name)
    return replace(request, config=replace(checked, launcher=launcher, run=home))


def _further_request(run: RunDirectory, line: CommandLine) -> Request:
    """Return the request of a run that exists, and show what differs from its previous one."""
    from nanoscale.cli.jobs.launching import show_changes
    from nanoscale.config.composing.frozen import load
    from nanoscale.launch.batch.allocation import requested_nodes
    from nanoscale.launch.lifecycle.continuation import completion, is_complete

    previous = load(run.config)
    request = next_request(run, line, requested_nodes)
    if is_complete(run, previous, request.config):
        raise UserError("run", completion(run))
    show_changes(previous, request.config)
    return request
