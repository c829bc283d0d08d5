"""`nanoscale submit`: the same job through SLURM, or many at once."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanoscale.cli.common import options as opt
from nanoscale.cli.common.options import as_settings
from nanoscale.cli.common.output import DONE, console, print_json
from nanoscale.cli.common.rehearsal import with_program
from nanoscale.cli.common.request import CommandLine, Refusals, planned, request_job, require_disk
from nanoscale.common import display

if TYPE_CHECKING:
    from nanoscale.common.errors import UserError
    from nanoscale.config.composing.compose import Setting
    from nanoscale.config.composing.variants import Variant
    from nanoscale.config.values.composed import Composed
    from nanoscale.launch.request import Request
    from nanoscale.launch.slurm.slurm import SlurmError
    from nanoscale.launch.submission.submit import BatchJob
    from nanoscale.runs.submission import Submission

_PARTITIONS, _ASSOCIATIONS = "sinfo --summarize", "sacctmgr show associations user=$USER"
_NODES = "sinfo --Node --Format=NodeHost,CPUs,Memory,Gres,Features"
_BLAMED = (
    (r"time limit", "launcher.slurm.time", _PARTITIONS),
    (r"qos", "launcher.slurm.qos", _ASSOCIATIONS),
    (r"account", "launcher.slurm.account", _ASSOCIATIONS),
    (r"partition", "launcher.slurm.partition", _PARTITIONS),
    (r"feature", "launcher.slurm.constraint", _NODES),
    (r"gres|generic resource", "launcher.slurm.gpus", _NODES),
    (r"node (count|configuration)", "launcher.nodes", _NODES),
    (r"unrecognized option|ambiguous", "launcher.slurm.directives", "sbatch --help"),
)
"""sbatch's complaint, the key that it may be about, and a command that shows more."""

_ALIKE = ("launcher.", "cluster.python", "run.root")
"""Keys that the script of an array depends on."""


def submit(
    overrides: opt.Overrides = None,
    config: opt.ConfigFile = None,
    config_dir: opt.ConfigDir = None,
    num_nodes: opt.NumNodes = None,
    num_gpus: opt.NumGpus = None,
    no_preflight: opt.NoPreflight = False,
    at_once: Annotated[
        int | None,
        typer.Option(
            "--at-once",
            metavar="N",
            min=1,
            help="Limit how many runs of an array (train.seed=1,2,3) run at once",
            show_default=False,
        ),
    ] = None,
    dry_run: opt.DryRun = False,
    force: opt.Force = False,
    rehearse: opt.Rehearse = False,
    trust: opt.Trust = False,
    as_json: opt.AsJson = False,
) -> int:
    """Submit a job to SLURM; lists of values make an array."""
    from nanoscale.config.composing.variants import expand
    from nanoscale.launch.slurm.slurm import SlurmError

    options = as_settings(num_nodes=num_nodes, num_gpus=num_gpus, no_preflight=no_preflight)
    variants = expand(overrides or [])
    line = CommandLine(variants[0].words, config, config_dir, _through_slurm(options), trust)
    line.require_startable()
    line = replace(line, trust=True)
    requests = [_request(replace(line, overrides=one.words), fetch=not dry_run) for one in variants]
    refusals = Refusals(postponed=dry_run)
    requests = [planned(request, refusals, force=force) for request in requests]
    requests = [with_program(one, rehearse=rehearse, force=force) for one in requests]
    for request in requests:
        require_disk(request, refusals, force=force)
    batch = _batch(requests, at_once, refusals)
    if dry_run:
        _show(batch, variants, refusals, as_json)
        return refusals.show()
    try:
        job = batch.submit()
    except SlurmError as error:
        raise _refused(error, requests[0].composed) from error
    if as_json:
        print_json({"job": job.job, "cluster": job.cluster, **_document(batch, variants, job)})
    else:
        _say(batch, variants, job)
    return DONE


# --- request --------------------------------------------------------------------------------------


def _through_slurm(options: dict[str, Setting]) -> dict[str, Setting]:
    from nanoscale.config.composing.compose import Setting
    from nanoscale.config.values.provenance import COMMAND_LINE

    return {"launcher.name": Setting("slurm", f"{COMMAND_LINE}: submit"), **options}


def _request(line: CommandLine, *, fetch: bool) -> Request:
    """Return one run, checked against the nodes to request from SLURM; `fetch` as in `with_weights`."""
    from nanoscale.launch.preflight.pretrained import with_weights
    from nanoscale.launch.slurm.allocation import wanted_nodes

    request = request_job(line, verify=_refuse_other_launchers, hosts=wanted_nodes)
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


def _batch(requests: list[Request], at_once: int | None, refusals: Refusals) -> BatchJob:
    """Return the runs with their names.

    Raises:
        UserError: they cannot be one job.
    """
    from nanoscale.common.errors import UserError
    from nanoscale.launch.lifecycle.prepare import (
        check_new_run,
        check_new_runs,
        name_run,
        name_runs,
    )
    from nanoscale.launch.submission.submit import BatchJob

    if len(requests) > 1:
        name, named = name_runs(requests)
        with refusals.gather():
            check_new_runs(named, name)
        batch = BatchJob(name, named, at_once)
        for other in named[1:]:
            if not batch.needs_the_same(other):
                _refuse_unlike(named[0], other)
        return batch
    if at_once is not None:
        raise UserError("usage", "--at-once needs an array of runs, as in train.seed=1,2,3")
    (one,) = requests
    config = name_run(one.composed, one.config, repeats=one.repeats is not None)
    with refusals.gather():
        check_new_run(config)
    return BatchJob(str(config.run.name), [replace(one, config=config)])


def _refuse_unlike(one: Request, other: Request) -> None:
    from nanoscale.cli.jobs.resume import differences
    from nanoscale.common.errors import Violation
    from nanoscale.config.violations import override, refuse, shown

    unlike = differences(one.config, other.config)
    message = "differs between the runs ({}), and one script asks SLURM for what they all need"
    refuse(
        [
            Violation(
                key,
                None,
                other.composed.source(key),
                message.format(" and ".join(map(shown, values))),
                (override(key, values[1]),),
            )
            for key, values in unlike.items()
            if key.startswith(_ALIKE)
        ]
    )


def _refused(error: SlurmError, composed: Composed) -> UserError:
    """Return sbatch's message as an error, with the key that it may be about."""
    from functools import reduce

    from nanoscale.common.errors import UserError, Violation

    said = str(error).replace("Batch job submission failed: ", "")
    for pattern, key, command in _BLAMED:
        if re.search(pattern, said, re.IGNORECASE):
            value = reduce(getattr, key.split("."), composed.config)
            cause = Violation(key, value, composed.source(key), said, (command,))
            return UserError("slurm", "SLURM rejected the job", [cause])
    return UserError("slurm", f"SLURM rejected the job: {said}")


# --- output ---------------------------------------------------------------------------------------


def _document(
    batch: BatchJob, variants: list[Variant], job: Submission | None = None
) -> dict[str, Any]:
    runs: list[dict[str, Any]] = []
    for number, (request, variant) in enumerate(zip(batch.requests, variants, strict=True)):
        entry = {
            "name": request.run.name,
            "run_dir": str(request.run.path),
            "values": variant.chosen,
        }
        if job is not None:
            entry["job"] = str(replace(job, task=number) if batch.is_array else job)
        runs.append(entry)
    return {"script": str(batch.path), "runs": runs}


def _show(batch: BatchJob, variants: list[Variant], refusals: Refusals, as_json: bool) -> None:
    """Show the result of `--dry-run`."""
    import shutil

    from nanoscale.config.rules.resolution import counted
    from nanoscale.view.run.launch_text import (
        derived_values,
        rehearsal_lines,
        saving_lines,
        settings,
    )

    config, nodes = batch.requests[0].config, batch.requests[0].hosts
    if as_json:
        document = {
            "world_size": config.world_size,
            "nodes": config.launcher.nodes or 1,
            "devices": config.launcher.devices,
            "settings": settings(config),
            "derived": derived_values(config),
            "text": batch.script,
            "checkpoints": batch.requests[0].saving.document(),
        }
        print_json({**document, **_document(batch, variants), **refusals.document()})
        return
    display.content(batch.script)
    worlds = {one.config.world_size for one in batch.requests}
    ranks = " or ".join(map(str, sorted(worlds)))
    display.note(f"{ranks} ranks on {counted(len(nodes), 'node')}")
    if batch.is_array:
        _print_runs(batch, variants)
    if shutil.which("sbatch") is None:
        display.note("sbatch is not installed here: submit from a login node")
    for line in (*rehearsal_lines(batch.requests[0]), *saving_lines(batch.requests[0])):
        display.note(line)
    display.note(f"this would be written to {batch.path}; nothing was written or submitted")


def _say(batch: BatchJob, variants: list[Variant], job: Submission) -> None:
    from nanoscale.view.run.launch_text import rehearsal_lines, saving_lines

    runs = [request.run for request in batch.requests]
    what = f"{len(runs)} runs are" if batch.is_array else f"{runs[0].name} is"
    display.show(f"{what} queued as job {job}")
    if batch.is_array:
        _print_runs(batch, variants)
    else:
        display.show(f"  run     {runs[0].path}")
    display.show(f"  script  {batch.path}")
    for line in (*rehearsal_lines(batch.requests[0]), *saving_lines(batch.requests[0])):
        display.show(f"  {line}")
    display.show(f"  follow  nanoscale runs watch {shlex.quote(runs[0].reference)}")
    display.show(f"  stop    nanoscale runs stop {shlex.quote(runs[0].reference)}")


def _print_runs(batch: BatchJob, variants: list[Variant]) -> None:
    """Print the values of each run."""
    from rich.table import Table

    table = Table("run", *variants[0].chosen, box=None)
    for request, variant in zip(batch.requests, variants, strict=True):
        table.add_row(request.run.name, *variant.chosen.values())
    display.print_table(console(error=True), table)
