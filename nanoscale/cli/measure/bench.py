"""`nanoscale bench`: what a recipe's steps take on this machine, or on the hosts of a job."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from nanoscale.cli.common import options as opt
from nanoscale.cli.common.options import as_settings
from nanoscale.cli.common.output import DONE, FAILED, console, print_json, saying
from nanoscale.cli.common.request import CommandLine, request_new_run
from nanoscale.common import display
from nanoscale.common.errors import UserError

if TYPE_CHECKING:
    from nanoscale.config.resolved import ResolvedConfig
    from nanoscale.config.values.composed import Composed

_RECORDED = 3
"""Steps after the timed ones, of which the first is ignored."""


def bench(
    overrides: opt.Overrides = None,
    steps: Annotated[int, typer.Option(help="Time this number of steps")] = 10,
    warmup: Annotated[int, typer.Option(help="Run this number of steps before the timed ones")] = 3,
    compare: Annotated[
        str | None,
        typer.Option(
            metavar="RUN|FILE",
            help="Compare with a run, or with the --json output of an earlier bench",
            show_default=False,
        ),
    ] = None,
    config: opt.ConfigFile = None,
    config_dir: opt.ConfigDir = None,
    hostfile: opt.Hostfile = None,
    include: opt.Include = None,
    exclude: opt.Exclude = None,
    num_nodes: opt.NumNodes = None,
    num_gpus: opt.NumGpus = None,
    no_preflight: opt.NoPreflight = False,
    force: opt.Force = False,
    trust: opt.Trust = False,
    as_json: opt.AsJson = False,
) -> int:
    """Measure a job's step time, its parts, MFU and memory.

    The job's ranks train for some steps; no run is created, and nothing is kept. With checkpoint.every, a
    checkpoint is written beside the runs, measured and removed; checkpoint.every=0 leaves that out.
    """
    from nanoscale.launch.lifecycle.bench import compared, document, read_other, room_for_checkpoint
    from nanoscale.launch.lifecycle.one_shot_job import OneShotJobError, run_one_shot_job
    from nanoscale.processes.messages import BENCH

    for option, value, least in (("--steps", steps, 1), ("--warmup", warmup, 0)):
        if value < least:
            raise UserError("usage", f"{option} {value}: must be at least {least}")
    other = read_other(compare) if compare is not None else None
    options = as_settings(hostfile, include, exclude, num_nodes, num_gpus, no_preflight)
    line = CommandLine(overrides, config, config_dir, options, trust)
    request = request_new_run(line, force=force, fetch=False, saves=False, verify=_refuse_profile)
    measured = _measured(request.config, warmup + steps + _RECORDED)
    with saying() as say, room_for_checkpoint(request.config) as folder:
        task = {"warmup": warmup, "steps": steps, "folder": folder and str(folder)}
        say("starting the ranks …")
        try:
            found = run_one_shot_job(BENCH, measured, request.hosts, task, say)
        except OneShotJobError as error:
            display.note(f"error: {error}")
            return FAILED
    told = {**document(request.config, found, request.plan), "warmup": warmup}
    if other is not None:
        told["compared"] = compared(told, other)
    if as_json:
        print_json(told)
    else:
        from nanoscale.view.bench_text import print_bench

        print_bench(console(), told)
    return DONE


def _refuse_profile(composed: Composed) -> None:
    steps = composed.config.profile.steps
    if steps is not None:
        raise UserError(
            "usage",
            f"profile.steps={steps} writes into a run, and a bench creates none: leave it out, or "
            f"type nanoscale train",
        )


def _measured(config: ResolvedConfig, steps: int) -> ResolvedConfig:
    """Return the ranks' configuration: random weights take as long, and the schedule fits all steps."""
    assert config.train.steps is not None
    train = replace(config.train, steps=max(config.train.steps, steps), sample_tokens=0)
    return replace(config, train=train, model=replace(config.model, init_from=None))
