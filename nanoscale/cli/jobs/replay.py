"""`nanoscale replay`: steps of a run once more, compared with what the run recorded."""

import sys
from dataclasses import replace

from nanoscale.cli.common import options as opt
from nanoscale.cli.common.output import DONE, FAILED, answer
from nanoscale.cli.common.request import LAUNCH, CommandLine, Refusals, request_new_run, requesting
from nanoscale.common import display
from nanoscale.launch.fleet.signals import Signals
from nanoscale.runs.directory import RunDirectory


@requesting(*LAUNCH)
def replay(
    run: opt.Run,
    line: CommandLine,
    steps: str = opt.option("Choose the steps, as in 12 or 12-20", default=..., metavar="N[-M]"),
    tolerance: float | None = opt.option(
        "Take relative differences up to this as equal", default=None, metavar="X", min=0
    ),
    dry_run: opt.DryRun = False,
    force: opt.Force = False,
    as_json: opt.AsJson = False,
) -> int:
    """Repeat steps of a run, and name the first that differs.

    The replay is a run of its own, on any hosts and in any layout, which begins with the newest checkpoint from
    before the steps. The exit code is 1 if a loss, a gradient norm or a tensor differs from what was recorded.
    In another layout, and on GPUs without precision.deterministic, 1e-5 of losses and 1e-3 of gradient norms
    and tensors count as rounding.
    """
    from nanoscale.cli.jobs.launching import follow, ready_fleet, show_plan
    from nanoscale.config.composing.compose import Setting
    from nanoscale.config.composing.frozen import load
    from nanoscale.launch.lifecycle import repetition
    from nanoscale.launch.lifecycle.prepare import new_run
    from nanoscale.view.run.replay_text import document, sentences, tolerances, without_records

    wanted = repetition.find_replay(RunDirectory.open(run), steps)
    typed = {word.partition("=")[0] for word in line.overrides or ()}
    chosen = {key: it for key, it in wanted.settings().items() if key not in typed}
    settings = {key: Setting(value, "replay") for key, value in chosen.items()}
    line = replace(line, config_file=wanted.config, options={**settings, **line.options})
    refusals = Refusals(postponed=dry_run)
    request = request_new_run(line, refusals, force=force)
    repetition.require_same_training(wanted, request)
    if missing := without_records(wanted):
        display.note(missing)
    if dry_run:
        return show_plan(request.run, request, 1, refusals, as_json)
    with Signals() as signals, ready_fleet(request, signals) as fleet, new_run(request) as lock:
        wanted.link(lock.run)
        outcome = follow(lock, request, 1, fleet, signals, sys.stderr if as_json else sys.stdout)
    layout = repetition.changed_layout(wanted, request.config)
    both = (load(wanted.config), request.config)
    is_fp64 = all(it.precision.compute == "fp64" for it in both)
    repeats = all(it.precision.deterministic or it.launcher.device == "cpu" for it in both)
    about = document(wanted, lock.run, tolerances(layout, is_fp64, tolerance, repeats), layout)
    code = outcome.exit_code or (DONE if about["first_difference"] is None else FAILED)
    shown = "\n".join(sentences(about, lock.run))
    answer(as_json, about | {"exit_code": code}, display.show, shown)
    return code
